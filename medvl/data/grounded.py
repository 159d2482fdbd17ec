"""Reports whose sentences have boxes, in the text format of MAIRA-2 (Bannur et al., arXiv
2406.04449).

    <obj>There is a left effusion.<box><x52><y60><x80><y88></box></obj><obj>No edema.</obj>

A sentence has any number of boxes: left, top, right and bottom in hundredths of the image that the
model sees, its centre square. A coordinate's value is the middle of its hundredth.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from medvl.data.annotations import published_size
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

BINS = 100
Box4 = tuple[float, float, float, float]
"""Left, top, right and bottom as shares of the image, in 0..1."""

_TAG = re.compile(r"<obj>|</obj>")
_BOX = re.compile(r"<box>(.*?)</box>", re.DOTALL)
_COORDINATES = re.compile(r"\s*<x(\d+)><y(\d+)><x(\d+)><y(\d+)>\s*")
_MARKS = re.compile(r"<box>.*?(?:</box>|$)|</?(?:obj|box)>|<[xy]\d+>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class GroundedSentence:
    """A sentence with its boxes; without any, it has no place in the image."""

    text: str
    boxes: tuple[Box4, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class GroundedReport:
    """A report, and what of its text was damaged."""

    sentences: tuple[GroundedSentence, ...]
    dropped_boxes: int = 0
    """Boxes that are damaged, empty, inverted, or outside of the image."""
    outside: int = 0
    """Texts outside of `<obj>`, which are sentences without a box."""

    @property
    def text(self) -> str:
        """The report without boxes."""
        return " ".join(sentence.text for sentence in self.sentences)


def read_grounded(text: str) -> GroundedReport:
    """Read a report with boxes. Damaged parts are counted, never refused: a sentence stays, a
    damaged box is left out.
    """
    sentences = []
    dropped = 0
    outside = 0
    inside = False
    start = 0
    for tag in [*_TAG.finditer(text), None]:
        piece = text[start : len(text) if tag is None else tag.start()]
        boxes, damaged = _boxes(piece)
        words = " ".join(_MARKS.sub(" ", piece).split())
        dropped += damaged
        if words:
            sentences.append(GroundedSentence(words, tuple(boxes) if inside else ()))
            outside += not inside
        if boxes and not (words and inside):  # boxes without a sentence
            dropped += len(boxes)
        if tag is not None:
            inside = tag[0] == "<obj>"
            start = tag.end()
    return GroundedReport(tuple(sentences), dropped, outside)


def write_grounded(sentences: Iterable[GroundedSentence]) -> str:
    """Return the text of a report with boxes.

    Raises ConfigError for a box that is empty, inverted or outside of the image.
    """
    return "".join(
        f"<obj>{sentence.text}{''.join(map(_written, sentence.boxes))}</obj>"
        for sentence in sentences
    )


def grounded_text(sample: Sample) -> str:
    """Return the text of a sample whose sentences have boxes (`extra["sentences"]`, as PadChest-GR
    has them); "" without sentences. Boxes are those of the centre square of the image.

    Raises CorpusError where sentences are malformed, or the size of the image is missing.
    """
    sentences = sample.extra.get("sentences") or []
    try:
        read = [
            (
                str(each["text"]),
                [
                    (box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"])
                    for box in each.get("boxes", [])
                ],
            )
            for each in cast(Any, sentences)
        ]
    except (TypeError, KeyError) as error:
        message = f"sample {sample.key}: malformed sentences; convert the corpus again"
        raise CorpusError(message, "malformed", field="sentences") from error
    height, width = published_size(sample) if any(boxes for _, boxes in read) else (1, 1)
    return write_grounded(
        GroundedSentence(
            text,
            tuple(
                boxes_in_square(
                    [
                        (x0 / width, y0 / height, x1 / width, y1 / height)
                        for x0, y0, x1, y1 in boxes
                    ],
                    width,
                    height,
                )
            ),
        )
        for text, boxes in read
    )


def boxes_in_square(boxes: Sequence[Box4], width: int, height: int) -> list[Box4]:
    """Return boxes of the picture as shares of its centre square, cut at its borders; those
    outside of it are left out.
    """
    left, top, side = _centre_square(width, height)
    cut = [
        (
            min(max((box[0] * width - left) / side, 0.0), 1.0),
            min(max((box[1] * height - top) / side, 0.0), 1.0),
            min(max((box[2] * width - left) / side, 0.0), 1.0),
            min(max((box[3] * height - top) / side, 0.0), 1.0),
        )
        for box in boxes
    ]
    return [box for box in cut if box[0] < box[2] and box[1] < box[3]]


def _centre_square(width: int, height: int) -> tuple[int, int, int]:
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side


def _boxes(piece: str) -> tuple[list[Box4], int]:
    """Return the boxes of a part of the text, and how many are damaged."""
    boxes: list[Box4] = []
    for content in _BOX.findall(piece):
        numbers = _COORDINATES.fullmatch(content)
        if numbers is None:
            continue
        left, top, right, bottom = map(int, numbers.groups())
        if left < right < BINS and top < bottom < BINS:
            x0, y0, x1, y1 = ((place + 0.5) / BINS for place in (left, top, right, bottom))
            boxes.append((x0, y0, x1, y1))
    return boxes, piece.count("<box>") - len(boxes)


def _written(box: Box4) -> str:
    left, top, right, bottom = box
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        message = f"expected left, top, right and bottom as shares of the image, got {box}"
        raise ConfigError(message, "out_of_range", field="boxes")
    x0, y0, x1, y1 = (min(BINS - 1, math.floor(BINS * place)) for place in box)
    return f"<box><x{x0}><y{y0}><x{x1}><y{y1}></box>"
