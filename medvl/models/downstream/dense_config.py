"""The settings of a detector of boxes and of a segmenter."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from medvl.errors import ConfigError
from medvl.models.base import SystemConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(SystemConfig):
    """A frozen image encoder and a small decoder on its grid of patches."""

    encoder: Mapping[str, Any]
    """Arguments of `create_image_encoder`, its name among them."""
    transform: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `EvalTransform`."""
    labels: tuple[str, ...]
    width: int = 128
    """Channels of the decoder."""
    doublings: int = 2
    """How often the decoder doubles the encoder's grid: 7 x 7 cells become 28 x 28."""

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ConfigError(f"labels must be one or more, each once; there are {len(self.labels)}")
        if self.width < 8 or self.width % 8:
            raise ConfigError(f"width must be a multiple of 8, got {self.width}")
        if not 0 <= self.doublings <= 5:
            raise ConfigError(f"doublings must be between 0 and 5, got {self.doublings}")
        if "name" not in self.encoder:
            raise ConfigError("encoder must name the image encoder: {'name': 'resnet50'}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterConfig(DenseConfig):
    """Masks of labels."""

    system: ClassVar[str] = "segmenter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorConfig(DenseConfig):
    """Boxes of labels."""

    system: ClassVar[str] = "detector"

    inner_share: float = 0.4
    """Cells in the inner part of a box, this share of each of its sides, learn to find it."""
    nms_iou_threshold: float = 0.4
    """Of two boxes of a label that overlap by more, the one with the lower score is left out."""
    max_boxes: int = 20
    """Most boxes of a label in an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("inner_share", "nms_iou_threshold"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name):g}")
        if self.max_boxes < 1:
            raise ConfigError(f"max_boxes must be 1 or more, got {self.max_boxes}")
