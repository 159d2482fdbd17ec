"""Fixed candidates and queries of a retrieval by class: sampled or read once, stored in a file,
identified by its hash.

    {"name": "chexpert-8x200", "classes": ["Atelectasis", ...],
     "candidates": [["<key>", ["Atelectasis"]], ...],
     "image_queries": [["<key>", ["Edema"]], ...],
     "text_queries": [["A pleural effusion is present.", ["Pleural Effusion"]], ...]}

Images are identified by the keys of their shards, which are salted hashes: a list fits shards of
one salt.
"""

import csv
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.files import write_atomic
from medvl.common.label_names import match_labels
from medvl.common.untrusted import ANYWHERE, parse_json
from medvl.data.annotations import frontal_or_lateral
from medvl.data.corpora.common.published_lists import read_published_list
from medvl.data.corpora.common.tables import check_columns, read_lines
from medvl.data.corpora.labels import chexpert
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError, EvaluationError
from medvl.eval.classification.scored_images import NO_FINDING
from medvl.eval.core.full_pass import Source
from medvl.schema import COMPETITION_FINDINGS, POSITIVE, UNCERTAIN

Exclusive = Literal["all_labels", "classes"]
"""Labels of which an image of a class must have no other: all of the source except No Finding,
or the classes.
"""
Views = Literal["frontal", "all"]
Item = tuple[str, tuple[str, ...]]
"""A key or a text, and its classes."""

CHEXPERT_8X200 = (
    "Atelectasis",
    "Cardiomegaly",
    "Edema",
    "Fracture",
    "No Finding",
    "Pleural Effusion",
    "Pneumonia",
    "Pneumothorax",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalList:
    """Candidates and queries with their classes. Raises `EvaluationError` for unknown classes
    and repeated items.
    """

    name: str
    classes: tuple[str, ...]
    candidates: tuple[Item, ...]
    image_queries: tuple[Item, ...] = ()
    """If empty, every candidate is a query among the others."""
    text_queries: tuple[Item, ...] = ()

    def __post_init__(self) -> None:
        for part in (self.candidates, self.image_queries, self.text_queries):
            unknown = {name for _, classes in part for name in classes} - set(self.classes)
            if unknown or any(not classes for _, classes in part):
                message = (
                    f"the list {self.name!r} has items without a class of {', '.join(self.classes)}"
                )
                raise EvaluationError(message, "unknown_name")
            if len({name for name, _ in part}) != len(part):
                raise EvaluationError(
                    f"the list {self.name!r} has an item twice: remove one", "conflict"
                )
        if not self.candidates:
            raise EvaluationError(f"the list {self.name!r} has no candidates", "empty")

    @property
    def sha256(self) -> str:
        """Hash of the list, for the results."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    @property
    def keys(self) -> set[str]:
        """Keys of all images."""
        return {key for key, _ in (*self.candidates, *self.image_queries)}

    def write(self, path: Path) -> Path:
        """Write the list as JSON (atomically) and return its path."""
        return write_atomic(path, self._text())

    def _text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> "RetrievalList":
        """Read a list written by `write`. Raises `EvaluationError`."""
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            parts = {
                name: _items(content[name])
                for name in ("candidates", "image_queries", "text_queries")
            }
            return cls(name=content["name"], classes=tuple(content["classes"]), **parts)
        except FileNotFoundError:
            message = f"{path} does not exist: create it with `medvl eval make-retrieval-list`"
            raise EvaluationError(message, "not_found") from None
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path} is not a list of candidates and queries ({type(error).__name__})"
            raise EvaluationError(message, "malformed") from error


def _items(rows: Sequence[Any]) -> tuple[Item, ...]:
    return tuple((str(name), tuple(map(str, classes))) for name, classes in rows)


def sample_list(
    source: Source,
    *,
    classes: Sequence[str] = COMPETITION_FINDINGS,
    per_class: int = 200,
    seed: int = 0,
    exclusive: Exclusive = "all_labels",
    views: Views = "frontal",
    name: str | None = None,
) -> RetrievalList:
    """Sample images that have exactly one class, the same number for each.

    An image belongs to a class if its label is 1 and no other is 1 or uncertain. Of these, the
    first `per_class` are taken in the order of a hash of (seed, key). The defaults are the rule of
    GLoRIA's 5x200 (`gloria/datasets/preprocess_datasets.py`), whose own draw its authors did not
    publish; `read_published` reads the draws of others.

    Args:
        source: samples with labels.
        classes: names of labels, in any spelling.
        per_class: images per class.
        seed: seed of the order.
        exclusive: the labels that count as others: "all_labels" of the sample except No Finding, or
            the "classes".
        views: "frontal" leaves out lateral and other views; images without a view count as frontal.
        name: name of the list; default a description of the settings.

    Raises EvaluationError if a class has too few images, or for an unknown rule.
    """
    check_choice(exclusive, get_args(Exclusive), "exclusive", error=EvaluationError)
    check_choice(views, get_args(Views), "views", error=EvaluationError)
    keys: dict[str, list[str]] = {name: [] for name in classes}
    class_of = {label: name for name, label in match_labels(classes, source.label_names).items()}
    for position in range(len(source)):
        sample = source.sample(position)
        if views == "frontal" and sample.view and frontal_or_lateral(sample.view) != "frontal":
            continue
        labels = {class_of.get(label, label): value for label, value in sample.labels.items()}
        if label := _only_class(labels, classes, exclusive):
            keys[label].append(sample.key)
    short = {label: len(of_label) for label, of_label in keys.items() if len(of_label) < per_class}
    if short or not classes:
        counts = ", ".join(f"{label} {count}" for label, count in short.items()) or "no class"
        message = f"expected {per_class} images with exactly one class, got fewer: {counts}"
        raise EvaluationError(message, "empty", field="per_class")
    candidates = [
        (key, (label,))
        for label, of_label in keys.items()
        for key in sorted(of_label, key=_order(seed))[:per_class]
    ]
    rule = f"{views} views, exclusive among {exclusive.replace('_', ' ')}"
    return RetrievalList(
        name=name or f"{len(classes)}x{per_class}, {rule}, seed {seed}",
        classes=tuple(classes),
        candidates=tuple(candidates),
    )


def _only_class(
    labels: Mapping[str, int], classes: Sequence[str], exclusive: Exclusive
) -> str | None:
    others = (
        {*labels} - {*match_labels((NO_FINDING,), [*labels]).values()}
        if exclusive == "all_labels"
        else set[str]()
    )
    present = [name for name in {*classes, *others} if labels.get(name) in (POSITIVE, UNCERTAIN)]
    only = len(present) == 1 and present[0] in classes and labels[present[0]] == POSITIVE
    return present[0] if only else None


def _order(seed: int) -> Any:
    return lambda key: hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()


def read_chexpert_8x200(root: Path, deid: Deidentifier) -> RetrievalList:
    """Read CheXpert 8x200 as ConVIRT's authors published it (yuhaozhang/convirt), with the keys of
    these shards.

    Args:
        root: holds `image-retrieval/candidate.csv` and `query.csv`, and `text-retrieval/query.csv`.
        deid: the deidentifier of the CheXpert shards.

    Raises CorpusError if a table is missing or differs from the published one.
    """
    images = root / "image-retrieval"
    texts = root / "text-retrieval"
    candidates = [
        (
            chexpert.image_key(row["Path"], deid),
            tuple(name for name in CHEXPERT_8X200 if row[name] == "1.0"),
        )
        for row in _rows(images / "candidate.csv", ("Path", *CHEXPERT_8X200))
    ]
    return RetrievalList(
        name="chexpert-8x200",
        classes=CHEXPERT_8X200,
        candidates=tuple(candidates),
        image_queries=tuple(
            (chexpert.image_key(row["Path"], deid), (_class_name(row["Variable"], images),))
            for row in _rows(images / "query.csv", ("Variable", "Path"))
        ),
        text_queries=tuple(
            (row["Text"].strip(), (_class_name(row["Variable"], texts),))
            for row in _rows(texts / "query.csv", ("Variable", "Text"))
        ),
    )


def read_published(
    path: Path, deid: Deidentifier, classes: Sequence[str] = COMPETITION_FINDINGS
) -> RetrievalList:
    """Read the candidates of a published list, such as CheXpert 5x200 in GLoRIA's layout, with the
    keys of these shards; every candidate is a query among the others.

    Args:
        path: a table with a column of CheXpert's or MIMIC-CXR's image paths (or dicom_id), and a
            column of 1 and 0 for each class.
        deid: the deidentifier of the shards.
        classes: names of the columns.

    Raises CorpusError if the table is damaged; EvaluationError if a candidate has no class.
    """
    listed = read_published_list(path, ANYWHERE, _image_name)
    if listed.studies:
        raise CorpusError(f"{path} lists studies: expected images", "malformed", field="Path")
    return RetrievalList(
        name=path.stem,
        classes=tuple(classes),
        candidates=tuple(
            (deid.image(name), tuple(label for label in classes if labels.get(label) == POSITIVE))
            for name, labels in listed.images.items()
        ),
    )


def _image_name(text: str) -> str:
    """Return the name of an image of CheXpert, else of MIMIC-CXR, as their converters hash it."""
    try:
        return chexpert.image_name(text)
    except CorpusError:
        return mimic_cxr.image_name(text)


def _rows(path: Path, required: Sequence[str]) -> list[Mapping[str, str]]:
    reader = csv.DictReader(read_lines(path, ANYWHERE))
    check_columns(path, reader.fieldnames or (), required)
    return list(reader)


def _class_name(name: str, folder: Path) -> str:
    if name not in CHEXPERT_8X200:
        message = (
            f"{folder / 'query.csv'}: Variable has {name!r}, expected one of the eight classes"
        )
        raise CorpusError(message, "unknown_name", field="Variable")
    return name
