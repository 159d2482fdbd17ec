"""Phrases of a report with the boxes that radiologists drew for them, as `Sample.extra` carries them.

    {"phrases": [{"label": "Pneumonia", "text": "Bibasilar opacities", "boxes": [{"x": 196, ...}, ...]}, ...],
     "image_width": 1767, "image_height": 2021}

Boxes are those of `medvl.data.annotations.boxes`: in pixels of the image as it was published.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from medvl.data.annotations.boxes import Box
from medvl.errors import CorpusError
from medvl.schema import Sample

_SIDES = ("x", "y", "width", "height")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    """Words about one image, and where what they say is seen."""

    label: str
    """The finding, by which results are told apart."""
    text: str
    boxes: tuple[Box, ...]
    """One or more: what the phrase is about is their union."""

    def as_json(self) -> dict[str, object]:
        """For `Sample.extra["phrases"]`."""
        return {"label": self.label, "text": self.text, "boxes": list(self.boxes)}


def phrases_of(sample: Sample) -> tuple[Phrase, ...]:
    """The phrases of a sample; where it has boxes without phrases, each finding's boxes with its name for a phrase.

    Empty where it has neither. Raises CorpusError when they are not as written, or the image's size is missing.
    """
    try:
        if "phrases" in sample.extra:
            found = [_phrase(entry) for entry in _list(sample.extra["phrases"])]
        else:
            by_label: dict[str, list[Box]] = {}
            for box in _list(sample.extra.get("boxes", [])):
                by_label.setdefault(str(box["label"]), []).append(_checked(box))
            found = [Phrase(label=label, text=label, boxes=tuple(boxes)) for label, boxes in by_label.items()]
    except (TypeError, KeyError, ValueError) as error:
        raise CorpusError(f"sample {sample.key}: its phrases or boxes are not as medvl writes them") from error
    if found:
        published_size(sample)
    return tuple(found)


def published_size(sample: Sample) -> tuple[int, int]:
    """(height, width) of the image that a sample's boxes are in pixels of. Raises CorpusError where it is missing."""
    height, width = (sample.extra.get(name) for name in ("image_height", "image_width"))
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise CorpusError(f"sample {sample.key} has boxes, and not the size of the image that they are pixels of")
    return height, width


def _phrase(entry: Mapping[str, Any]) -> Phrase:
    boxes = tuple(_checked(box) for box in _list(entry["boxes"]))
    if not boxes:
        raise ValueError("a phrase without boxes")
    return Phrase(label=str(entry["label"]), text=str(entry["text"]), boxes=boxes)


def _checked(box: Mapping[str, Any]) -> Box:
    return {"label": str(box["label"]), **{side: float(box[side]) for side in _SIDES}}


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value
