"""Cleaning of reports for vocabularies of words: lower case, full stops as words, no other punctuation.

"1. Nodule of 3.2 cm.\n2. No effusion."   ->   "nodule of 3.2 cm . no effusion ."
"""

import re

_PUNCTUATION = r",?;*!%^&_+()\[\]{}:<=>@\"/\\'"
_REMOVED = re.compile(rf"[{_PUNCTUATION}]|(?<!\d)\.|\.(?!\d)")
_LIST_NUMBER = re.compile(r"(^|\. )\d{1,2}\. ")
_SENTENCE_END = re.compile(r"\.+(?:\s+|$)")
_REMOVED_BY_R2GEN = re.compile(rf"[.{_PUNCTUATION}]")


def clean_report(text: str) -> str:
    """Return the words of a report, separated by spaces, each sentence closed by a full stop.

    As R2Gen's cleaner, except that decimal points are kept and that numbers are removed at the start of a sentence
    only: R2Gen's changes `3.2 cm` to `32 cm`, and `T11. The` to `t1the`.
    """
    text = _LIST_NUMBER.sub(r"\1", re.sub(r"\.{2,}", ".", " ".join(text.split())))
    sentences = (" ".join(_REMOVED.sub("", part).split()) for part in _SENTENCE_END.split(text.lower()))
    return " ".join(f"{sentence} ." for sentence in sentences if sentence)


def clean_report_as_r2gen(text: str) -> str:
    """Return the words of a report as R2Gen's released cleaner does, for vocabularies of its published checkpoints.

    Decimal points are removed, and list numbers at any place.
    """
    text = re.sub(r"\.{2,}", ".", re.sub(r"_{2,}", "_", " ".join(text.split())))
    text = text.replace("1. ", "")
    for number in "2345":
        text = text.replace(f". {number}. ", ". ")
    for number in "2345":
        text = text.replace(f" {number}. ", ". ")
    sentences = (_REMOVED_BY_R2GEN.sub("", part).strip() for part in text.strip().lower().split(". "))
    return " ".join((" . ".join(sentences) + " .").split())
