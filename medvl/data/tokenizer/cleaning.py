"""Cleaning of texts in the released code of dual-encoders and fusion-encoders, before a BERT
tokenizer.

"1. There is a 3.2 cm nodule - left/right?"
   words ->  "there is a 3 2 cm nodule left right"
   albef ->  "1 there is a 32 cm nodule left right"
"""

import re

_STOP_OR_NUMBER = re.compile(r"[0-9]+\.|\.")
_WORD = re.compile(r"\w+")
_DELETED_BY_ALBEF = re.compile(r"[,.'!?\"()*#:;~]")
_BLANKS_OF_ALBEF = str.maketrans({"-": " ", "/": " "})
_ALBEF_WORDS = 30


def clean_words(text: str) -> str:
    """Return the lower-case words of a text without punctuation and other than ASCII characters
    (GLoRIA, CARZero).

    Full stops end sentences, together with a number before them, and sentences of one word are
    removed. A text without a longer sentence keeps its words, where the released code leaves
    nothing of it.
    """
    sentences = [_WORD.findall(part.lower()) for part in _STOP_OR_NUMBER.split(text)]
    longer = [words for words in sentences if len(words) > 1]
    words = [
        word.encode("ascii", "ignore").decode("ascii")
        for part in longer or sentences
        for word in part
    ]
    return " ".join(word for word in words if word)


def clean_as_albef(text: str) -> str:
    """Return a caption or a question as ALBEF, M2I2 and MUMC read it: lower case, 30 words,
    little punctuation.
    """
    text = _DELETED_BY_ALBEF.sub("", text.lower()).translate(_BLANKS_OF_ALBEF)
    return " ".join(text.split()[:_ALBEF_WORDS])


# Cleaning of reports for vocabularies of words: lower case, full stops as words, no other
# punctuation.
#
# "1. Nodule of 3.2 cm. 2. No effusion."   ->   "nodule of 3.2 cm . no effusion ."

_PUNCTUATION = r",?;*!%^&_+()\[\]{}:<=>@\"/\\'"
_REMOVED = re.compile(rf"[{_PUNCTUATION}]|(?<!\d)\.|\.(?!\d)")
_LIST_NUMBER = re.compile(r"(^|\. )\d{1,2}\. ")
_SENTENCE_END = re.compile(r"\.+(?:\s+|$)")
_REMOVED_BY_R2GEN = re.compile(rf"[.{_PUNCTUATION}]")


def clean_report(text: str) -> str:
    """Return the words of a report, separated by spaces, each sentence closed by a full stop.

    As R2Gen's cleaner, except that decimal points are kept and that numbers are removed at the
    start of a sentence only: R2Gen's changes `3.2 cm` to `32 cm`, and `T11. The` to `t1the`.
    """
    text = _LIST_NUMBER.sub(r"\1", re.sub(r"\.{2,}", ".", " ".join(text.split())))
    sentences = (
        " ".join(_REMOVED.sub("", part).split()) for part in _SENTENCE_END.split(text.lower())
    )
    return " ".join(f"{sentence} ." for sentence in sentences if sentence)


def clean_report_as_r2gen(text: str) -> str:
    """Return the words of a report as R2Gen's released cleaner does, for vocabularies of its
    published checkpoints.

    Decimal points are removed, and list numbers at any place.
    """
    text = re.sub(r"\.{2,}", ".", re.sub(r"_{2,}", "_", " ".join(text.split())))
    text = text.replace("1. ", "")
    for number in "2345":
        text = text.replace(f". {number}. ", ". ")
    for number in "2345":
        text = text.replace(f" {number}. ", ". ")
    sentences = (
        _REMOVED_BY_R2GEN.sub("", part).strip() for part in text.strip().lower().split(". ")
    )
    return " ".join((" . ".join(sentences) + " .").split())
