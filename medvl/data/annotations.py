"""Annotations of images: boxes, run-length masks, phrases and questions."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medvl.errors import CorpusError, ImageError
from medvl.schema import NEGATIVE, POSITIVE, Sample

# Bounding boxes of an image in `Sample.extra`.
#
#     {"boxes": [{"label": "Mass", "x": 225.1, "y": 547.0, "width": 86.8, "height": 79.2}],
#      "image_width": 1024, "image_height": 1024}
#
# x and y are the left and top edge. All values are in pixels of the published image, whose size
# is stored too: shards hold a smaller copy. An annotated image without any box has an empty list.
# Where the tables of a release lack the size, the conversion fills it in from the image
# (`add_size`).

Box = dict[str, object]
Size = tuple[float, float]
"""Width and height in pixels."""

_UNKNOWN: Size = (math.inf, math.inf)
_SAME_OBJECT_IOU = 0.5


def read_box(
    label: str, fields: Sequence[str | float], size: tuple[int, int] | None, where: Path
) -> Box:
    """Parse a box from its left, top, width and height in a table, for an image of `size` (width,
    height).

    With None for the size, the right and bottom edges are checked by `add_size`. Raises
    CorpusError, naming the file, when a field is not a number, or the box is empty or exceeds the
    image by more than a pixel.
    """
    x, y, width, height = _four_numbers(label, fields, where)
    return _checked(label, (x, y, width, height), size or _UNKNOWN, where)


def read_corners(
    label: str, fields: Sequence[str | float], size: tuple[int, int] | None, where: Path
) -> Box:
    """Parse a box from its left, top, right and bottom edge; otherwise as `read_box`."""
    left, top, right, bottom = _four_numbers(label, fields, where)
    return _checked(label, (left, top, right - left, bottom - top), size or _UNKNOWN, where)


def add_size(extra: Mapping[str, object], shape: tuple[int, ...]) -> Mapping[str, object]:
    """Return `Sample.extra` with the size of the image of `shape` (height, width) if it has boxes
    and lacks the size.

    Raises ImageError ("mismatch") when a box exceeds the image by more than a pixel: it is not the
    published one.
    """
    boxes: Any = extra.get("boxes")
    if boxes is None or "image_width" in extra:
        return extra
    height, width = shape[:2]
    if not all(
        _is_inside((box["x"], box["y"], box["width"], box["height"]), (width, height))
        for box in boxes
    ):
        message = (
            f"a box exceeds the image of {width} x {height} pixels; expected the image as "
            f"published, not resized"
        )
        raise ImageError(message, "mismatch", field="boxes")
    return region_fields((width, height), extra)


def merge_readers(boxes_by_reader: Iterable[Sequence[Box]]) -> list[Box]:
    """Return the boxes of several readers of one image, with the boxes of one object replaced by
    their mean.

    A box joins the first group of its label that has no box of its reader yet and whose first box
    it overlaps by an intersection over union of at least 0.5; else it begins a group.
    """
    groups: list[tuple[list[Box], set[int]]] = []
    for reader, boxes in enumerate(boxes_by_reader):
        for box in boxes:
            for group, readers in groups:
                if (
                    reader not in readers
                    and box["label"] == group[0]["label"]
                    and _iou(box, group[0]) >= _SAME_OBJECT_IOU
                ):
                    group.append(box)
                    readers.add(reader)
                    break
            else:
                groups.append(([box], {reader}))
    return [_mean(group) for group, _ in groups]


def _four_numbers(
    label: str, fields: Sequence[str | float], where: Path
) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = (float(field) for field in fields)
    except (TypeError, ValueError):
        raise CorpusError(
            f"{where}: expected four numbers for a box of {label}", "malformed", field="boxes"
        ) from None
    return a, b, c, d


def _checked(label: str, box: tuple[float, float, float, float], size: Size, where: Path) -> Box:
    x, y, width, height = box
    if not all(map(math.isfinite, box)) or width <= 0 or height <= 0 or not _is_inside(box, size):
        message = (
            f"{where}: a box of {label} is empty or exceeds its image of {size[0]} x "
            f"{size[1]} pixels"
        )
        raise CorpusError(message, "out_of_range", field="boxes")
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def _is_inside(box: tuple[float, float, float, float], size: Size) -> bool:
    x, y, width, height = box
    return x > -1 and y > -1 and x + width < size[0] + 1 and y + height < size[1] + 1


def _edges(box: Mapping[str, Any]) -> tuple[float, float, float, float]:
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


def _iou(one: Box, other: Box) -> float:
    (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = _edges(one), _edges(other)
    overlap = max(0.0, min(right, right_2) - max(left, left_2)) * max(
        0.0, min(bottom, bottom_2) - max(top, top_2)
    )
    union = (right - left) * (bottom - top) + (right_2 - left_2) * (bottom_2 - top_2) - overlap
    return overlap / union


def _mean(group: Sequence[Mapping[str, Any]]) -> Box:
    sides = ("x", "y", "width", "height")
    return {
        "label": group[0]["label"],
        **{side: sum(box[side] for box in group) / len(group) for side in sides},
    }


def region_fields(size: tuple[int, int], regions: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `Sample.extra` for regions in pixels of an image of `size` (width,
    height).
    """
    return {**regions, "image_width": size[0], "image_height": size[1]}


def crop_regions(
    extra: Mapping[str, object], area: tuple[int, int, int, int], size: tuple[int, int]
) -> dict[str, object]:
    """Return `Sample.extra` for the part of an image inside of an area: left, top, width, height.

    Boxes, phrases, shapes and masks are those of the part; `crop` has the area, in pixels of the
    published image of `size` (width, height), and that size.
    """
    left, top, width, height = area

    def shift(box: Mapping[str, Any]) -> Box:
        return {**box, "x": box["x"] - left, "y": box["y"] - top}

    cropped: dict[str, Any] = dict(extra)
    if "boxes" in extra:
        cropped["boxes"] = [shift(box) for box in _list(extra["boxes"])]
    if "phrases" in extra:
        cropped["phrases"] = [
            {**phrase, "boxes": [shift(box) for box in phrase["boxes"]]}
            for phrase in _list(extra["phrases"])
        ]
    if "shapes" in extra:
        cropped["shapes"] = [
            {
                **shape,
                "points": [
                    value - (top if place % 2 else left)
                    for place, value in enumerate(shape["points"])
                ],
            }
            for shape in _list(extra["shapes"])
        ]
    if "masks" in extra:
        part = (slice(top, top + height), slice(left, left + width))
        masks = [(each, decode_runs(each["runs"], *size[::-1])) for each in _list(extra["masks"])]
        cropped["masks"] = [{**each, "runs": encode_runs(mask_HW[part])} for each, mask_HW in masks]
    if "image_width" in extra:
        cropped = region_fields((width, height), cropped)
    place = {"x": left, "y": top, "width": width, "height": height}
    cropped["crop"] = {**place, "image_width": size[0], "image_height": size[1]}
    return cropped


def box_edges(extra: Mapping[str, object]) -> list[tuple[float, float, float, float]]:
    """Return left, top, right and bottom of all boxes of a sample, those of phrases included."""
    boxes = list(_list(extra.get("boxes", [])))
    boxes += [box for phrase in _list(extra.get("phrases", [])) for box in phrase["boxes"]]
    return [_edges(box) for box in boxes]


# Run-length encoded masks in the format of the SIIM-ACR release.
#
# The text is a list of pairs "gap length gap length ...": pixels outside and then inside the
# mask, column by column from the top left corner; each gap is counted from the end of the
# previous run. "-1" is an empty mask.

EMPTY = "-1"


def decode_runs(runs: str, height: int, width: int) -> NDArray[np.bool_]:
    """Return the mask (height, width). Raises CorpusError when the text is malformed or exceeds
    the mask.
    """
    if runs.strip() == EMPTY:
        return np.zeros((height, width), np.bool_)
    try:
        steps = np.array(runs.split(), dtype=np.int64)
    except (ValueError, OverflowError):
        raise CorpusError(
            "expected integers for the runs of a mask", "malformed", field="masks"
        ) from None
    if not len(steps) or len(steps) % 2 or (steps < 0).any() or (steps[1::2] == 0).any():
        raise CorpusError(
            "expected pairs of a gap and a length for the runs of a mask",
            "malformed",
            field="masks",
        )
    # Check the sum before allocating anything of that size; the first test also catches a sum that
    # overflows.
    if (steps > height * width).any() or steps.sum() > height * width:
        raise CorpusError(
            f"the runs of a mask exceed its {height} x {width} pixels",
            "out_of_range",
            field="masks",
        )
    inside = np.repeat(np.arange(len(steps)) % 2 == 1, steps)
    column_major = np.zeros(height * width, np.bool_)
    column_major[: len(inside)] = inside
    return column_major.reshape(width, height).T


def encode_runs(mask_HW: NDArray[np.bool_]) -> str:
    """Return the run-length text of a mask, as `decode_runs` reads it."""
    column_major = np.concatenate([[False], mask_HW.T.ravel().astype(np.bool_), [False]])
    edges = np.flatnonzero(column_major[1:] != column_major[:-1])
    if not len(edges):
        return EMPTY
    return " ".join(map(str, np.diff(edges, prepend=0).tolist()))


def read_starts(text: str, height: int, width: int) -> str:
    """Return the run-length text, as `decode_runs` reads it, of pairs of a start and a length.

    Starts count pixels from 1, column by column from the top left corner, and increase: a list of
    gaps, as in SIIM-ACR, is refused where its numbers show that it is one.

    Raises CorpusError when the text is malformed, or exceeds a mask of (height, width).
    """
    if text.strip() in ("", EMPTY):
        return EMPTY
    try:
        pairs_N2 = np.array(text.split(), dtype=np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        message = "expected pairs of a start and a length for the runs of a mask"
        raise CorpusError(message, "malformed", field="masks") from None
    if (pairs_N2 < 1).any() or (pairs_N2 > height * width).any():
        message = f"the runs of a mask exceed its {height} x {width} pixels, counted from 1"
        raise CorpusError(message, "out_of_range", field="masks")
    ends_N = pairs_N2.sum(axis=1)
    gaps_N = pairs_N2[:, 0] - np.concatenate([[1], ends_N[:-1]])
    if (gaps_N < 0).any():
        message = "expected runs that do not overlap, by increasing start; are these gaps?"
        raise CorpusError(message, "malformed", field="masks")
    runs = " ".join(map(str, np.stack([gaps_N, pairs_N2[:, 1]], axis=1).ravel().tolist()))
    decode_runs(runs, height, width)
    return runs


# Report phrases with the boxes that radiologists drew for them, in `Sample.extra`.
#
#     {"phrases": [{"label": "Pneumonia", "text": "Bibasilar opacities", "boxes": [{"x": 196,
#     ...}, ...]}, ...],
#      "image_width": 1767, "image_height": 2021}
#
# Boxes have the format of `medvl.data.annotations`: pixels of the published image.

_SIDES = ("x", "y", "width", "height")
_NORMAL = "No Finding"
_NO_LABEL = "no label"
"""Label of a sentence that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    """A phrase about one image and the boxes that it refers to."""

    label: str
    """Finding; results are reported per label."""
    text: str
    boxes: tuple[Box, ...]
    """The target region is their union; empty for a phrase without a place in the image."""

    def as_json(self) -> dict[str, object]:
        """Return the entry for `Sample.extra["phrases"]`."""
        return {"label": self.label, "text": self.text, "boxes": list(self.boxes)}


def phrases_of(sample: Sample) -> tuple[Phrase, ...]:
    """Return the phrases of a sample that have boxes, empty if it has none.

    For a sample with boxes but no phrases, each label is a phrase with the boxes of that label.
    Raises CorpusError when the annotations are malformed or the size of the image is missing.
    """
    read = _read_phrases if "phrases" in sample.extra else _boxed_labels
    return tuple(phrase for phrase in _checked_phrases(sample, read) if phrase.boxes)


def all_phrases_of(sample: Sample) -> tuple[Phrase, ...]:
    """Return the phrases of a sample with any number of boxes, empty if it was not annotated.

    * Sentences of a report (PadChest-GR): all of them, with their first label.
    * Regions with findings (Chest ImaGenome): each finding, with the boxes of the regions that have
      it; a finding that all regions deny has none.
    * Phrases (MS-CXR), all of which have boxes in the release.
    * Boxes by label: each label with its boxes. A label that the sample denies, other than
      "No Finding", is a phrase without a box.

    A label that is present and has no box is left out. Raises as `phrases_of`.
    """
    if "sentences" in sample.extra:
        return _checked_phrases(sample, _read_sentences)
    if "regions" in sample.extra:
        return _checked_phrases(sample, _findings_of_regions)
    if "phrases" in sample.extra:
        return _checked_phrases(sample, _read_phrases)
    return _checked_phrases(sample, _denied_labels) if "boxes" in sample.extra else ()


def is_annotated(sample: Sample) -> bool:
    """Return whether `all_phrases_of` reads a sample's annotations."""
    return not sample.extra.keys().isdisjoint(("sentences", "regions", "phrases", "boxes"))


def _checked_phrases(
    sample: Sample, read: Callable[[Sample], Iterable[Phrase]]
) -> tuple[Phrase, ...]:
    try:
        phrases = tuple(read(sample))
    except (TypeError, KeyError, ValueError) as error:
        message = f"sample {sample.key}: malformed phrases or boxes; convert the corpus again"
        raise CorpusError(message, "malformed", field="phrases") from error
    if phrases:
        published_size(sample)
    return phrases


def _read_phrases(sample: Sample) -> Iterator[Phrase]:
    for entry in _list(sample.extra["phrases"]):
        boxes = tuple(_box(box) for box in _list(entry["boxes"]))
        yield Phrase(label=str(entry["label"]), text=str(entry["text"]), boxes=boxes)


def _boxed_labels(sample: Sample) -> Iterator[Phrase]:
    by_label: dict[str, list[Box]] = {}
    for box in _list(sample.extra.get("boxes", [])):
        by_label.setdefault(str(box["label"]), []).append(_box(box))
    for label, boxes in by_label.items():
        yield Phrase(label=label, text=label, boxes=tuple(boxes))


def _denied_labels(sample: Sample) -> Iterator[Phrase]:
    boxed = tuple(_boxed_labels(sample))
    yield from boxed
    for label, value in sample.labels.items():
        if value == NEGATIVE and label != _NORMAL and label not in {each.label for each in boxed}:
            yield Phrase(label=label, text=label, boxes=())


def _read_sentences(sample: Sample) -> Iterator[Phrase]:
    for entry in _list(sample.extra["sentences"]):
        boxes = tuple(_box(box) for box in _list(entry.get("boxes", [])))
        labels = [*map(str, _list(entry.get("labels", []))), *(box["label"] for box in boxes[:1])]
        yield Phrase(label=str((labels or [_NO_LABEL])[0]), text=str(entry["text"]), boxes=boxes)


def _findings_of_regions(sample: Sample) -> Iterator[Phrase]:
    boxes = {box["label"]: box for box in map(_box, _list(sample.extra["boxes"]))}
    present: dict[str, list[str]] = {}
    for region in _list(sample.extra["regions"]):
        for finding, value in region["findings"].items():
            places = present.setdefault(str(finding), [])
            places += [str(region["name"])] if value == POSITIVE else []
    for finding, places in present.items():
        region_boxes = tuple(boxes[place] for place in places if place in boxes)
        if region_boxes or not places:
            yield Phrase(label=finding, text=finding, boxes=region_boxes)


def published_size(sample: Sample) -> tuple[int, int]:
    """Return (height, width) of the image that a sample's boxes refer to. Raises CorpusError
    when it is missing.
    """
    height, width = (sample.extra.get(name) for name in ("image_height", "image_width"))
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise CorpusError(
            f"sample {sample.key}: boxes without an image size", "missing", field="image_height"
        )
    return height, width


def _box(box: Mapping[str, Any]) -> Box:
    return {"label": str(box["label"]), **{side: float(box[side]) for side in _SIDES}}


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


# Questions and answers about images, in the form of the VQA corpora.
#
# A sample is an image; its questions are JSON objects in `Sample.extra["questions"]`. Each
# question has its own split, because some releases split questions instead of images (VQA-RAD).
# If the questions of one image are in several splits, all samples of the release have the split
# `MIXED`, and readers must select questions by their own split.

AnswerType = Literal["closed", "open"]
MIXED = "mixed"
"""Split of every sample of a release that divides the questions about one image among splits."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters of options, in order."""
DIFFERENCE = "difference"
"""Kind of the questions about two images of a patient (Medical-Diff-VQA)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about an image and its answer as released (repaired, not normalized)."""

    id: str
    """Unique in its corpus."""
    question: str
    answer: str
    """Empty where the release has none; such a question counts in every denominator and no
    answer matches it.
    """
    answer_type: AnswerType
    """From the dataset's own field, or inferred from yes/no where it has none (see the data
    card).
    """
    kind: str = ""
    """Question type of the dataset; several are joined by ", " in alphabetical order."""
    organ: str = ""
    split: str
    phrasing: str = ""
    """freeform, para or frame in VQA-RAD; vqa or kvqa in SLAKE."""
    category: str = ""
    """Group of question types, where a release has one."""
    options: tuple[str, ...] = ()
    """Distinct options of a multiple-choice question, without letters; empty for others."""
    right: tuple[int, ...] = ()
    """Indices of the right options, in increasing order. `answer` is their text."""

    def with_letters(self) -> str:
        """Return the question with its options behind letters, as one text."""
        options = zip(LETTERS, self.options, strict=False)
        return f"{self.question} Options: {' '.join(f'{letter}. {o}' for letter, o in options)}"

    def with_option(self, option: str) -> str:
        """Return the question with an option, as one text."""
        return f"{self.question} {option}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `Sample.extra["questions"]`, without empty fields except the
        answer.
        """
        values = {name: value for name, value in dataclasses.asdict(self).items() if value}
        lists = {name: list(values[name]) for name in _LISTS if name in values}
        return {**values, "answer": self.answer, **lists}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Question":
        """Parse an entry; unknown fields are ignored. Raises CorpusError when a field is missing
        or has another type, or options and right ones do not fit.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in data]
        try:
            lists = {name: tuple(_list(data[name])) for name in _LISTS if name in names}
            question = cls(**{**{name: data[name] for name in names}, **lists})
        except TypeError:
            expected = "a question with id, question, answer, answer_type and split"
            raise CorpusError(f"expected {expected}, got {', '.join(names)}", "missing") from None
        question._check_options()
        for name in names:
            if name not in _LISTS and not isinstance(getattr(question, name), str):
                raise CorpusError(
                    f"question {question.id}: expected a string for {name}",
                    "wrong_type",
                    field=name,
                )
        if question.answer_type not in ("closed", "open"):
            message = (
                f"question {question.id}: expected answer_type closed or open, got "
                f"{question.answer_type!r}"
            )
            raise CorpusError(message, "unknown_name", field="answer_type")
        return question

    def _check_options(self) -> None:
        """Raise CorpusError where options repeat or have no letter, or right ones are not among
        them.
        """
        places = range(len(self.options))
        if (
            any(not isinstance(option, str) for option in self.options)
            or len(set(self.options)) < len(self.options)
            or len(self.options) > len(LETTERS)
            or any(type(place) is not int or place not in places for place in self.right)
            or [*self.right] != sorted(set(self.right))
        ):
            message = (
                f"question {self.id}: expected at most {len(LETTERS)} distinct options and indices "
                f"of right ones"
            )
            raise CorpusError(message, "malformed", field="options")


_LISTS = ("options", "right")
"""Fields of a question that are lists in JSON."""


def questions_of(sample: Sample) -> tuple[Question, ...]:
    """Return the questions of a sample, empty if it has none. Raises CorpusError when they are
    malformed.
    """
    entries = sample.extra.get("questions", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise CorpusError(
            "a sample's questions must be a list of objects", "wrong_type", field="questions"
        )
    return tuple(Question.from_json(entry) for entry in entries)


# Frontal and lateral views, from the words that corpora use for the projection of an image.

_LATERAL = {"LATERAL", "LL", "RL"}
_FRONTAL = {"FRONTAL", "PA", "AP", "LLD", "RLD"}


def frontal_or_lateral(view: str | None) -> Literal["frontal", "lateral"] | None:
    """Return the kind of a view such as `Sample.view` ("PA", "AP LLD", "XTABLE LATERAL"); None:
    unknown or neither.

    Decubitus films (LLD, RLD) are frontal projections of a patient who lies on the side.
    """
    words = set((view or "").upper().split())
    if words & _LATERAL:
        return "lateral"
    return "frontal" if words & _FRONTAL else None
