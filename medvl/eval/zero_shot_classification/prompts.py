"""Prompt sets: the sentences that stand for each class, as JSON files that state how they are judged.

Ours lie in `prompt_sets/`; a user's own file has the same form, with any class names (findings, modalities, planes):

    {"name": "modality", "version": 1, "description": "CT against MR.",
     "scoring": "class_softmax", "temperature": 0.1, "ensemble": "similarity_mean",
     "classes": {"CT": {"positive": ["Axial CT image."]}, "MR": {"positive": ["Sagittal MR image."]}}}

A class is judged on the label column of its name. How the similarities of one image become the score of a class:

* "pair_softmax": softmax over (positive, negative), each divided by the temperature. A probability. Temperature 1 is
  the raw cosine of CheXzero: the ranking is that of any other temperature, the probability stays near 0.5.
* "class_softmax": softmax over the positive similarities of all classes, divided by the temperature.
* "margin": positive minus negative similarity; not a probability.
* "gloria_published": the positive similarity by GLoRIA's published zero-shot code (the model's `published_similarity`),
  standardised over the images of the test set, class by class. So a score depends on the other images: for comparison
  with what was published, and for nothing else. Not a probability.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from medvl.errors import EvaluationError

Scoring = Literal["pair_softmax", "class_softmax", "margin", "gloria_published"]
COMPETING: tuple[Scoring, ...] = ("class_softmax", "gloria_published")
"""Scorings in which classes compete with each other, without negative sentences."""
Ensemble = Literal["similarity_mean", "similarity_max", "embedding_mean"]

_FOLDER = Path(__file__).parent / "prompt_sets"


@dataclasses.dataclass(frozen=True, slots=True)
class ClassPrompts:
    """The sentences of one class; `negative` is empty where classes compete with each other."""

    positive: tuple[str, ...]
    negative: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """A prompt file, checked. `load_prompts` makes it; `select` narrows it."""

    name: str
    version: int
    description: str
    scoring: Scoring
    temperature: float
    """Divides similarities before a softmax; unused by the other scorings. Far below 0.05, probabilities of sure
    images round to 1 and tie."""
    ensemble: Ensemble
    """How several sentences of one class become one: by the mean or the maximum of their similarities, or by the
    normalised mean of their embeddings (for models without a local term)."""
    classes: Mapping[str, ClassPrompts]
    sha256: str
    """Of the file, as `sha256sum` prints it."""

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores lie between 0 and 1 and can be judged for calibration."""
        return self.scoring not in ("margin", "gloria_published")

    def select(self, names: Sequence[str]) -> "PromptSet":
        """The same set with these classes only, in this order. Raises `EvaluationError` naming those it lacks."""
        unknown = [name for name in names if name not in self.classes]
        if unknown:
            raise EvaluationError(
                f"prompt set {self.name!r} has no class {', '.join(unknown)}: it has {', '.join(self.classes)}"
            )
        selected = dataclasses.replace(self, classes={name: self.classes[name] for name in names})
        _check_classes(self.name, selected)
        return selected

    def texts(self) -> tuple[str, ...]:
        """Every distinct sentence, in order of appearance."""
        sentences = (
            sentence for prompts in self.classes.values() for sentence in (*prompts.positive, *prompts.negative)
        )
        return tuple(dict.fromkeys(sentences))


def list_prompts() -> list[str]:
    """Names of the sets that come with medvl."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def load_prompts(name_or_path: str | Path) -> PromptSet:
    """A set of ours by name, or anybody's by the path of its JSON file.

    Raises `EvaluationError` that names the file, the class and what is wrong.
    """
    own = _FOLDER / f"{name_or_path}.json"
    path = own if isinstance(name_or_path, str) and name_or_path in list_prompts() else Path(name_or_path)
    if not path.is_file():
        raise EvaluationError(
            f"no prompt set {str(name_or_path)!r}: name one of {', '.join(list_prompts())}, or the path of a JSON file"
        )
    content = path.read_bytes()
    try:
        data = json.loads(content.decode(), object_pairs_hook=_unique_keys)
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise EvaluationError(f"{path} is not a JSON prompt set: {error}") from error
    return _parse(data, str(path), hashlib.sha256(content).hexdigest())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} stands there twice")
    return dict(pairs)


def _parse(data: Any, where: str, sha256: str) -> PromptSet:
    types: dict[str, type | tuple[type, ...]] = {
        "name": str,
        "version": int,
        "description": str,
        "scoring": str,
        "temperature": (int, float),
        "ensemble": str,
        "classes": dict,
    }
    if not isinstance(data, dict) or set(data) != set(types):
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise EvaluationError(f"{where}: a prompt set has exactly the fields {', '.join(types)}; found {found}")
    for field, kind in types.items():
        if not isinstance(data[field], kind) or isinstance(data[field], bool):
            raise EvaluationError(f"{where}: the field {field} has the wrong type ({type(data[field]).__name__})")
    for field, allowed in (("scoring", Scoring), ("ensemble", Ensemble)):
        if data[field] not in get_args(allowed):
            raise EvaluationError(f"{where}: {field} is {data[field]!r}, not one of {', '.join(get_args(allowed))}")
    if not 0 < data["temperature"] < float("inf"):
        raise EvaluationError(f"{where}: the temperature is {data['temperature']}, and must be above 0")
    classes = {name: _parse_class(prompts, f"{where}: class {name!r}") for name, prompts in data["classes"].items()}
    prompts = PromptSet(**{**data, "temperature": float(data["temperature"]), "classes": classes, "sha256": sha256})
    _check_classes(where, prompts)
    return prompts


def _parse_class(data: Any, where: str) -> ClassPrompts:
    if not isinstance(data, dict) or not {"positive"} <= set(data) <= {"positive", "negative"}:
        raise EvaluationError(f"{where} needs a list 'positive' of sentences, and may have a list 'negative'")
    sides = {}
    for side, sentences in data.items():
        if not isinstance(sentences, list) or not sentences:
            raise EvaluationError(f"{where}: {side!r} must be a list of at least one sentence")
        if not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences):
            raise EvaluationError(f"{where}: {side!r} holds something that is not a sentence")
        sides[side] = tuple(sentences)
    listed = [sentence for sentences in sides.values() for sentence in sentences]
    repeated = sorted({sentence for sentence in listed if listed.count(sentence) > 1})
    if repeated:
        raise EvaluationError(f"{where}: the sentence {repeated[0]!r} stands there twice")
    return ClassPrompts(**sides)


def _check_classes(where: str, prompts: PromptSet) -> None:
    if prompts.scoring in COMPETING:
        with_negative = [name for name, sides in prompts.classes.items() if sides.negative]
        if with_negative:
            raise EvaluationError(f"{where}: classes compete, so {with_negative[0]!r} must not have negative sentences")
        if len(prompts.classes) < 2:
            raise EvaluationError(f"{where}: {prompts.scoring} needs at least two classes")
        return
    without = [name for name, sides in prompts.classes.items() if not sides.negative]
    if without or not prompts.classes:
        raise EvaluationError(f"{where}: {prompts.scoring} needs classes with negative sentences; see {without[:3]}")
