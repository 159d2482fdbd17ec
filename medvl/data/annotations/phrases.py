"""Report phrases with the boxes that radiologists drew for them, in `Sample.extra`.

    {"phrases": [{"label": "Pneumonia", "text": "Bibasilar opacities", "boxes": [{"x": 196, ...}, ...]}, ...],
     "image_width": 1767, "image_height": 2021}

Boxes have the format of `medvl.data.annotations.boxes`: pixels of the published image.
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
    """A phrase about one image and the boxes that it refers to."""

    label: str
    """Finding; results are reported per label."""
    text: str
    boxes: tuple[Box, ...]
    """One or more; the target region is their union."""

    def as_json(self) -> dict[str, object]:
        """Return the entry for `Sample.extra["phrases"]`."""
        return {"label": self.label, "text": self.text, "boxes": list(self.boxes)}


def phrases_of(sample: Sample) -> tuple[Phrase, ...]:
    """Return the phrases of a sample, empty if it has none.

    For a sample with boxes but no phrases, each label is a phrase with the boxes of that label. Raises CorpusError when
    the annotations are malformed or the size of the image is missing.
    """
    try:
        if "phrases" in sample.extra:
            phrases = [_phrase(entry) for entry in _list(sample.extra["phrases"])]
        else:
            by_label: dict[str, list[Box]] = {}
            for box in _list(sample.extra.get("boxes", [])):
                by_label.setdefault(str(box["label"]), []).append(_box(box))
            phrases = [Phrase(label=label, text=label, boxes=tuple(boxes)) for label, boxes in by_label.items()]
    except (TypeError, KeyError, ValueError) as error:
        message = f"sample {sample.key}: malformed phrases or boxes; convert the corpus again"
        raise CorpusError(message, "malformed", field="phrases") from error
    if phrases:
        published_size(sample)
    return tuple(phrases)


def published_size(sample: Sample) -> tuple[int, int]:
    """Return (height, width) of the image that a sample's boxes refer to. Raises CorpusError when it is missing."""
    height, width = (sample.extra.get(name) for name in ("image_height", "image_width"))
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise CorpusError(f"sample {sample.key}: boxes without an image size", "missing", field="image_height")
    return height, width


def _phrase(entry: Mapping[str, Any]) -> Phrase:
    boxes = tuple(_box(box) for box in _list(entry["boxes"]))
    if not boxes:
        raise ValueError("a phrase without boxes")
    return Phrase(label=str(entry["label"]), text=str(entry["text"]), boxes=boxes)


def _box(box: Mapping[str, Any]) -> Box:
    return {"label": str(box["label"]), **{side: float(box[side]) for side in _SIDES}}


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value
