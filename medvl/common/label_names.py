"""Names of labels: spellings that mean the same, and the words of a name for a sentence.

Data sets write `Pleural_Effusion`, `pleural-effusion`, `PLEURAL EFFUSION`, `PleuralEffusion` or
`finding=effusion`. Two names match if they differ only in case, separators, British spelling, or a
plural "s"; or if a group of `SYNONYMS` has both. All evaluators match labels by `match_labels`, and
prompts say `spoken_name`.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from medvl.errors import EvaluationError

SYNONYMS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("pleural effusion", "effusion"),
            ("lung opacity", "airspace opacity", "pulmonary opacity"),
            ("edema", "pulmonary edema", "lung edema"),
            ("consolidation", "pulmonary consolidation", "lung consolidation"),
            ("lung lesion", "pulmonary lesion"),
            ("nodule", "lung nodule", "pulmonary nodule"),
            ("mass", "lung mass", "pulmonary mass"),
            ("fibrosis", "pulmonary fibrosis", "lung fibrosis"),
            ("emphysema", "pulmonary emphysema", "lung emphysema"),
            ("atelectasis", "atelectases"),
            ("pneumothorax", "pneumothoraces"),
            ("enlarged cardiomediastinum", "enlarged cardiom"),
            ("interstitial lung disease", "ild"),
            ("tuberculosis", "tb"),
            ("covid-19", "covid"),
        ),
    )
)
"""Names of one finding of chest radiographs: of CheXpert, MIMIC-CXR, NIH ChestX-ray14, VinDr-CXR
and PadChest.
"""
_GENERIC = frozenset(
    (
        "finding",
        "findings",
        "label",
        "labels",
        "class",
        "diagnosis",
        "pathology",
        "disease",
        "category",
        "condition",
    )
)
"""Names of columns that add nothing to their values."""
_YES = frozenset(("1", "1.0", "yes", "true", "positive", "present"))
_NO = frozenset(("0", "0.0", "no", "none", "false"))
_BEFORE = ("has", "is", "label", "finding")
_AFTER = ("label", "present", "positive", "flag", "binary")
_BRITISH = (("oedema", "edema"), ("haem", "hem"), ("tumour", "tumor"), ("oesophag", "esophag"))


def spoken_name(name: str) -> str:
    """Return the words of a label for a sentence: "pleural effusion" of `Pleural_Effusion` or
    `finding=effusion`.

    Of a category `edema_severity=mild` they are "mild edema severity". An empty name is returned as
    it is.
    """
    words = _words(name).lower()
    return words or name


def match_labels(
    classes: Sequence[str], labels: Sequence[str], *, synonyms: bool = True
) -> dict[str, str]:
    """Return class -> label for the classes that have a label of the data, in the order of the
    classes.

    The same name comes first, then the same name in another spelling, then a synonym. No label
    belongs to two classes. A class with several synonyms among the labels has none of them, because
    they may be different things there.

    Raises EvaluationError "conflict" if two labels are spellings of one class, and none of them is
    its name.
    """
    return _matched(classes, labels, synonyms, refuse=True)


def _matched(
    classes: Sequence[str], labels: Sequence[str], synonyms: bool, *, refuse: bool
) -> dict[str, str]:
    label_of: dict[str, str] = {name: name for name in classes if name in labels}
    keys: list[Callable[[str], str]] = [_key, *([_meaning] if synonyms else [])]
    for level, key in enumerate(keys):
        free = [label for label in labels if label not in label_of.values()]
        of_key: dict[str, list[str]] = {}
        for label in free:
            of_key.setdefault(key(label), []).append(label)
        for name in classes:
            if name in label_of or not key(name):
                continue
            candidates = of_key.get(key(name), [])
            if refuse and len(candidates) > 1 and level == 0:
                message = (
                    f"the labels {' and '.join(map(repr, candidates))} are spellings of "
                    f"{name!r}; keep one of them"
                )
                raise EvaluationError(message, "conflict", field="labels")
            if len(candidates) == 1 and candidates[0] not in label_of.values():
                label_of[name] = candidates[0]
    return {name: label_of[name] for name in classes if name in label_of}


def named_as(
    labels: Sequence[str], classes: Sequence[str], *, synonyms: bool = True
) -> tuple[str, ...]:
    """Return the labels with the names of the classes that they match, and the others unchanged.

    Several spellings of one class, none of which is its name, are unchanged as well.
    """
    class_of = {
        label: name for name, label in _matched(classes, labels, synonyms, refuse=False).items()
    }
    return tuple(class_of.get(label, label) for label in labels)


def renamed_labels(matched: Mapping[str, str]) -> dict[str, str]:
    """Return class -> label where their names differ, to be reported with results."""
    return {name: label for name, label in matched.items() if name != label}


def _key(name: str) -> str:
    """Return what is equal for all spellings of a name; "" for a name without letters and
    digits.
    """
    key = "".join(letter for letter in _words(name).casefold() if letter.isalnum())
    for british, american in _BRITISH:
        key = key.replace(british, american)
    return key[:-1] if key.endswith("s") and not key.endswith(("ss", "is", "us")) else key


def _meaning(name: str) -> str:
    """Return what is equal for all names of one finding."""
    key = _key(name)
    return _group_of().get(key, key)


@functools.cache
def _group_of() -> Mapping[str, str]:
    return {_key(name): min(map(_key, group)) for group in SYNONYMS for name in group}


def _words(name: str) -> str:
    """Return the words of a name in their case, with single blanks."""
    text = " ".join(unicodedata.normalize("NFKC", name).split()).strip(" .,;:\"'")
    column, sign, value = text.partition("=")
    if not sign and text.partition(":")[0].strip().casefold() in _GENERIC:
        column, sign, value = text.partition(":")
    if sign and column.strip() and value.strip():
        return _words_of_category(_split(column), _split(value))
    return _split(text)


def _words_of_category(column: str, value: str) -> str:
    if column.casefold() in _GENERIC:
        return "no finding" if value.casefold() == "none" else value
    if value.casefold() in _YES:
        return column
    return f"no {column}" if value.casefold() in _NO else f"{value} {column}"


def _split(text: str) -> str:
    """Return a name with blanks for its separators."""
    text = text.strip()
    if " " not in text:
        whole = "_" not in text and "-" not in text
        text = re.sub(r"(?<=[^\W\d_]{3})[-.](?=[^\W\d_]{3})", " ", text)
        if whole:
            text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)
    if "_" in text:
        words = re.sub(r"_+", " ", text).split()
        if len(words) > 1 and words[0].casefold() in _BEFORE:
            words = words[1:]
        if len(words) > 1 and words[-1].casefold() in _AFTER:
            words = words[:-1]
        text = " ".join(words)
    return text
