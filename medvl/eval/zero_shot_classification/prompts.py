"""Prompt sets: JSON files with the sentences of each class and the rule that turns similarities
into scores.

Built-in sets are in `prompt_sets/`. Files of the same format define others, with any class names
(findings, modalities, planes):

    {"name": "modality", "version": 1, "description": "CT against MR.",
     "scoring": "class_softmax", "temperature": 0.1, "ensemble": "similarity_mean", "classes":
     {"CT": {"positive": ["Axial CT image."]}, "MR": {"positive": ["Sagittal MR image."]}}}

"version", "description" and "ensemble" may be left out (1, "", "similarity_mean"). A class is
evaluated on the label column of the same name, whatever its case and separators, or of a synonym
(`medvl.common.label_names`). "other_classes", which may be left out as well, has the sentences of
label columns that are not listed, with {} for the words of the column's name in lower case:
{"positive": ["There is {}."]}. A set with "other_classes" asks synonyms by their own name. Scoring
rules:

* "pair_softmax": softmax over (positive, negative) similarities divided by the temperature; a
  probability. CheXzero uses temperature 1: the ranking does not depend on the temperature, but the
  probabilities stay near 0.5.
* "class_softmax": softmax over the positive similarities of all classes, divided by the
  temperature.
* "margin": positive minus negative similarity; not a probability.
* "positive": the positive similarity alone, without negative sentences; not a probability (RadZero,
  CARZero).
* "gloria_best_word": the positive similarity that GLoRIA's zero-shot code is meant to compute, by
  the best word (`GLoRIA.best_word_similarity`), standardised over the test images per class; not a
  probability. A score then depends on the other images: use it only to compare with published
  results.
* "gloria_published": the same as the published code computes it (`GLoRIA.published_similarity`): it
  counts characters instead of words, so that a prompt has dozens of additional words that are zero
  vectors.

"positive" and "negative" are lists of sentences, or {"parts": [LIST, LIST, ...]} for every
combination of one string from each list; empty strings are left out.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from medvl.common.config_io import nearest
from medvl.common.label_names import match_labels, spoken_name
from medvl.common.text_files import decode_text
from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError

Scoring = Literal[
    "pair_softmax", "class_softmax", "margin", "positive", "gloria_best_word", "gloria_published"
]
STANDARDIZED: tuple[Scoring, ...] = ("gloria_best_word", "gloria_published")
"""GLoRIA's scoring rules, whose scores are standardised over the images of a test set."""
COMPETING: tuple[Scoring, ...] = ("class_softmax", *STANDARDIZED)
"""Scoring rules in which classes compete with each other, without negative sentences."""
WITHOUT_NEGATIVES: tuple[Scoring, ...] = ("positive", *COMPETING)
Ensemble = Literal["similarity_mean", "similarity_max", "embedding_mean", "embedding_mean_raw"]

_OPTIONAL = {"version": 1, "description": "", "ensemble": "similarity_mean", "other_classes": None}
"""Fields that a file may leave out, with their values."""
_FOLDER = Path(__file__).parent / "prompt_sets"


@dataclasses.dataclass(frozen=True, slots=True)
class ClassPrompts:
    """Sentences of one class; `negative` is empty if classes compete with each other."""

    positive: tuple[str, ...]
    negative: tuple[str, ...] = ()

    def filled(self, noun: str) -> "ClassPrompts":
        """Return the sentences with `noun` in place of {}."""
        positive, negative = (
            tuple(text.replace("{}", noun) for text in texts)
            for texts in (self.positive, self.negative)
        )
        return ClassPrompts(positive, negative)


ADVICE = (
    'take --prompts statements, which has "There is X." for every label of the data, or a JSON '
    "file with sentences for "
    "your labels (guides/evaluation.md)"
)
"""What to do with labels that a prompt set does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Validated content of a prompt file, as returned by `load_prompts`."""

    name: str
    version: int
    description: str
    scoring: Scoring
    temperature: float
    """Divisor of similarities before a softmax, unused by other rules. Far below 0.05, high
    probabilities round to 1 and tie.
    """
    ensemble: Ensemble
    """Pooling over the sentences of a class: mean or maximum of the similarities, or the normalised
    mean of the embeddings (only for models without a local term): of the normalised ones, or "raw",
    of the projections before they are normalised, as BioViL does it.
    """
    classes: Mapping[str, ClassPrompts]
    other_classes: ClassPrompts | None = None
    """Sentences of labels that are not in `classes`, with {} for the name; None: such labels are
    not evaluated.
    """
    sha256: str
    """sha256 of the file."""

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities, so that calibration is defined."""
        return self.scoring not in ("margin", "positive", *STANDARDIZED)

    def select(self, names: Sequence[str]) -> "PromptSet":
        """Return the set with only these classes, in this order. Raises `EvaluationError` naming
        unknown ones.
        """
        unknown = [name for name in names if name not in self.classes]
        if unknown:
            message = (
                f"prompt set {self.name!r} has no class {', '.join(unknown)}; it has "
                f"{', '.join(self.classes)}"
            )
            raise EvaluationError(message, "unknown_name", field="names")
        selected = dataclasses.replace(self, classes={name: self.classes[name] for name in names})
        _check_classes(self.name, selected)
        return selected

    def for_labels(self, names: Sequence[str], chosen: Sequence[str] = ()) -> "PromptSet":
        """Return the set for data with these labels: with `other_classes` for those that it does
        not list.

        With `chosen`, only those classes are kept, in any spelling. Raises `EvaluationError` for
        one that is no label or has no sentences.
        """
        label_of = self.labels_of(names)
        matches = match_labels(chosen, names)
        unknown = [name for name in chosen if name not in matches]
        if unknown:
            message = f"the data have no label {', '.join(unknown)}: {nearest(unknown[0], names)}"
            raise EvaluationError(message, "unknown_name", field="labels")
        others = self.other_classes
        more = {}
        if others is not None:
            more = {
                name: others.filled(spoken_name(name))
                for name in names
                if name not in label_of.values()
            }
        extended = dataclasses.replace(self, classes={**self.classes, **more})
        class_of = {label: name for name, label in label_of.items()}
        wanted_classes = [class_of.get(label, label) for label in matches.values()]
        without = [name for name in wanted_classes if name not in extended.classes]
        if without:
            message = f"the prompts {self.name!r} have no sentences for {', '.join(without)}"
            raise EvaluationError(f"{message}; {ADVICE}", "unknown_name", field="labels")
        return extended.select(wanted_classes) if chosen else extended

    def labels_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return class -> label of the data, for the classes that have one (`match_labels`).

        A set with `other_classes` has its own sentences for synonyms.
        """
        return match_labels(list(self.classes), names, synonyms=self.other_classes is None)

    def texts(self) -> tuple[str, ...]:
        """Return every distinct sentence, in order of appearance."""
        sentences = (
            sentence
            for prompts in self.classes.values()
            for sentence in (*prompts.positive, *prompts.negative)
        )
        return tuple(dict.fromkeys(sentences))


def list_prompts() -> list[str]:
    """Return the names of the built-in prompt sets."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def default_prompts(model: object) -> str:
    """Return the name of a model's own prompt set, such as `DualEncoder.zero_shot_prompts`."""
    return str(getattr(model, "zero_shot_prompts", "chexpert_ensemble"))


def load_prompts(name_or_path: str | Path) -> PromptSet:
    """Load a built-in prompt set by name, or a JSON file by path.

    Raises `EvaluationError` naming the file and the invalid class or field.
    """
    own = _FOLDER / f"{name_or_path}.json"
    path = (
        own
        if isinstance(name_or_path, str) and name_or_path in list_prompts()
        else Path(name_or_path)
    )
    if not path.is_file():
        message = (
            f"no prompt set {str(name_or_path)!r}; give one of "
            f"{', '.join(list_prompts())} or a JSON file"
        )
        raise EvaluationError(message, "unknown_name", field="prompts")
    content = path.read_bytes()
    try:
        data = parse_json(decode_text(content, path, EvaluationError, field="prompts"))
    except ValueError as error:  # includes JSON and UTF-8 errors
        raise EvaluationError(
            f"{path} is not valid JSON: {error}", "malformed", field="prompts"
        ) from error
    return _parse(data, str(path), hashlib.sha256(content).hexdigest())


def _parse(data: Any, where: str, sha256: str) -> PromptSet:
    types: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "version": int,
        "description": str,
        "scoring": str,
        "temperature": (int, float),
        "ensemble": str,
        "classes": dict,
        "other_classes": (dict, type(None)),
    }
    if not isinstance(data, dict):
        raise _malformed(
            f"{where}: expected an object with the fields {', '.join(types)}, got a list or value",
            "fields",
        )
    data = _OPTIONAL | data
    unknown = sorted(data.keys() - types.keys())
    missing = [field for field in types if field not in data]
    if unknown or missing:
        detail = "; ".join(f"{kind} {', '.join(map(repr, fields))}"
                           for kind, fields in (("unknown", unknown), ("missing",
                           missing)) if fields)  # fmt: skip
        raise _malformed(
            f"{where}: expected the fields {', '.join(types)}, got: {detail}", "fields"
        )
    for field, kind in types.items():
        if not isinstance(data[field], kind) or isinstance(data[field], bool):
            raise _malformed(
                f"{where}: {field} has the wrong type {type(data[field]).__name__}",
                field,
                "wrong_type",
            )
    for field, allowed in (("scoring", Scoring), ("ensemble", Ensemble)):
        if data[field] not in get_args(allowed):
            names = ", ".join(get_args(allowed))
            message = f"{where}: expected {field} to be one of {names}, got {data[field]!r}"
            raise _malformed(message, field, "unknown_name")
    if not 0 < data["temperature"] < float("inf"):
        raise _malformed(
            f"{where}: expected temperature > 0, got {data['temperature']}",
            "temperature",
            "out_of_range",
        )
    classes = {
        name: _parse_class(prompts, f"{where}: class {name!r}")
        for name, prompts in data["classes"].items()
    }
    parsed = {"classes": classes, "other_classes": _parse_others(data["other_classes"], where)}
    prompts = PromptSet(
        **{**data, **parsed, "temperature": float(data["temperature"]), "sha256": sha256}
    )
    _check_classes(where, prompts)
    return prompts


def _parse_others(data: Any, where: str) -> ClassPrompts | None:
    if data is None:
        return None
    others = _parse_class(data, f"{where}: other_classes")
    if not all("{}" in text for text in (*others.positive, *others.negative)):
        raise _malformed(
            f"{where}: other_classes: expected {{}} in each sentence, for the name", "other_classes"
        )
    return others


def _parse_class(data: Any, where: str) -> ClassPrompts:
    if not isinstance(data, dict) or not {"positive"} <= set(data) <= {"positive", "negative"}:
        raise _malformed(
            f"{where}: expected a list 'positive' and optionally a list 'negative'", "classes"
        )
    sides = {}
    for side, sentences in data.items():
        if isinstance(sentences, dict):
            sentences = _combine(sentences, f"{where}: {side!r}", side)
        if not isinstance(sentences, list) or not sentences:
            raise _malformed(
                f"{where}: expected {side!r} to be a list of at least one sentence", side
            )
        if not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences):
            raise _malformed(f"{where}: expected only non-empty strings in {side!r}", side)
        sides[side] = tuple(sentences)
    listed = [sentence for sentences in sides.values() for sentence in sentences]
    repeated = sorted({sentence for sentence in listed if listed.count(sentence) > 1})
    if repeated:
        raise _malformed(f"{where}: duplicate sentence {repeated[0]!r}", "classes")
    return ClassPrompts(**sides)


def _combine(data: Mapping[str, Any], where: str, side: str) -> list[str]:
    """Return every combination of one string from each list of "parts", joined by blanks,
    without empty strings.
    """
    parts = data.get("parts")
    lists = parts if set(data) == {"parts"} and isinstance(parts, list) else [None]
    if not all(
        isinstance(part, list) and part and all(isinstance(text, str) for text in part)
        for part in lists
    ):
        raise _malformed(
            f"{where}: expected a list of sentences or {{'parts': [LIST, ...]}} of lists of "
            f"strings",
            side,
        )
    return [" ".join(filter(None, combination)) for combination in itertools.product(*lists)]


def _check_classes(where: str, prompts: PromptSet) -> None:
    others = {} if prompts.other_classes is None else {"other_classes": prompts.other_classes}
    classes = {**prompts.classes, **others}
    if prompts.scoring in WITHOUT_NEGATIVES:
        with_negative = [name for name, sides in classes.items() if sides.negative]
        if with_negative:
            text = (
                f"{where}: {prompts.scoring} does not use negative sentences, but "
                f"{with_negative[0]!r} has some"
            )
            raise _malformed(text, "scoring", "conflict")
        if prompts.scoring in COMPETING and len(prompts.classes) < 2:
            raise _malformed(f"{where}: {prompts.scoring} needs at least two classes", "classes")
        return
    without = [name for name, sides in classes.items() if not sides.negative]
    if without or not prompts.classes:
        message = (
            f"{where}: {prompts.scoring} needs negative sentences of each class; see {without[:3]}"
        )
        raise _malformed(message, "classes")


def _malformed(message: str, field: str, code: str = "malformed") -> EvaluationError:
    return EvaluationError(message, code, field=field)
