"""Cleaning of texts in the released code of dual-encoders and fusion-encoders, before a BERT tokenizer.

"1. There is a 3.2 cm nodule - left/right?"
   words ->  "there is a 3 2 cm nodule left right"
   albef ->  "1 there is a 32 cm nodule left right"
"""

import re

_SENTENCE_END = re.compile(r"[0-9]+\.|\.")
_WORD = re.compile(r"\w+")
_DELETED_BY_ALBEF = re.compile(r"[,.'!?\"()*#:;~]")
_BLANKS_OF_ALBEF = str.maketrans({"-": " ", "/": " "})
_ALBEF_WORDS = 30


def clean_words(text: str) -> str:
    """Return the lower-case words of a text without punctuation and other than ASCII characters (GLoRIA, CARZero).

    Full stops end sentences, together with a number before them, and sentences of one word are removed. A text without
    a longer sentence keeps its words, where the released code leaves nothing of it.
    """
    sentences = [_WORD.findall(part.lower()) for part in _SENTENCE_END.split(text)]
    longer = [words for words in sentences if len(words) > 1]
    words = [word.encode("ascii", "ignore").decode("ascii") for part in longer or sentences for word in part]
    return " ".join(word for word in words if word)


def clean_as_albef(text: str) -> str:
    """Return a caption or a question as ALBEF, M2I2 and MUMC read it: lower case, 30 words, little punctuation."""
    text = _DELETED_BY_ALBEF.sub("", text.lower()).translate(_BLANKS_OF_ALBEF)
    return " ".join(text.split()[:_ALBEF_WORDS])
