"""Image encoder of regions that a detector has encoded.

Letters: B batch, P regions, D width.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl.errors import ConfigError
from medvl.schema import Batch, ImageFeatures

# Codes of the boxes of regions, as fusion-encoders read them.
#
# All are pure functions that return new tensors: a released implementation normalises its cached
# boxes in place in every epoch, so that they drift towards zero. Rows of zeros, which are
# padding, stay zero.

BoxCode = Literal[4, 7]
"""Numbers of a box: 4 for VisualBERT and LXMERT, 7 for UNITER."""


def relative_boxes(boxes_P4: Tensor, height: int, width: int) -> Tensor:
    """Return boxes (left, top, right, bottom) in pixels as float32 shares of the image's width
    and height, in 0..1.
    """
    scale_4 = torch.tensor(
        [width, height, width, height], dtype=torch.float32, device=boxes_P4.device
    )
    return (boxes_P4.float() / scale_4).clamp(0, 1)


def box_code(boxes_P4: Tensor, numbers: BoxCode) -> Tensor:
    """Return the code (..., numbers) of relative boxes (..., 4), which are (left, top, right,
    bottom) in 0..1.

    4: the boxes themselves (VisualBERT, arXiv 1908.03557; LXMERT, arXiv 1908.07490, section 2.1).
    7: left, top, right, bottom, width, height, area (UNITER, arXiv 1909.11740, section 3.1).

    Raises ConfigError for another number, and for a tensor of another width.
    """
    if numbers not in (4, 7):
        raise ConfigError(
            f"expected a box code of 4 or 7 numbers, got {numbers}", "out_of_range", field="numbers"
        )
    if boxes_P4.shape[-1] != 4:
        message = f"expected boxes (..., 4), got {tuple(boxes_P4.shape)}"
        raise ConfigError(message, "mismatch", field="region_boxes_BP4")
    if numbers == 4:
        return boxes_P4.clone()
    size_P2 = boxes_P4[..., 2:] - boxes_P4[..., :2]
    return torch.cat([boxes_P4, size_P2, size_P2.prod(dim=-1, keepdim=True)], dim=-1)


class RegionEncoder(nn.Module):
    """An image encoder without parameters for regions that a detector has encoded.

    Args:
        width: width of a region's features.
        code: numbers of the box code that follows the features (`medvl.encoders.regions`); None: no
            boxes.

    Attributes:
        feature_dim, patch_dim: width of a region's features and box code together.
        detector: hash of the detector, once `bind` was called, or a checkpoint was loaded; None:
            unknown.
        trained_on: manifests of the shards that the detector, and the model with it, were trained
            on.
    """

    def __init__(self, width: int, code: BoxCode | None = None) -> None:
        super().__init__()
        self.code = code
        self.detector: str | None = None
        self.trained_on: tuple[Mapping[str, Any], ...] = ()
        self.feature_dim = self.patch_dim = width + (code or 0)

    def bind(
        self, detector: str, sha256: str, width: int, trained_on: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Record the detector of the regions that this model is trained with.

        Args:
            detector: its name.
            sha256: its hash.
            width: width of the features that it writes for a region.
            trained_on: manifests of the shards that it was trained on.

        Raises ConfigError for regions of another width, or of another detector than the model was
        trained with.
        """
        expected = self.patch_dim - (self.code or 0)
        if width != expected:
            message = (
                f"{detector} writes {width} features: use image_encoder regions:{width}, "
                f"not regions:{expected}"
            )
            raise ConfigError(message, "mismatch", field="image_encoder")
        if self.detector not in (None, sha256):
            message = (
                "the model was trained with regions of another detector; give those as data.regions"
            )
            raise ConfigError(message, "mismatch", field="data.regions")
        self.detector = sha256
        self.trained_on += tuple(each for each in trained_on if each not in self.trained_on)

    def read(self, batch: Batch) -> Tensor:
        """(B, P, D) float32: the features of a batch's regions, followed by their box codes.

        Raises ConfigError when the batch lacks them.
        """
        if batch.regions_BPD is None or (self.code is not None and batch.region_boxes_BP4 is None):
            field = "regions_BPD" if batch.regions_BPD is None else "region_boxes_BP4"
            message = (
                f"expected Batch.{field}; set data.regions to a folder that `medvl "
                f"regions` wrote for these shards"
            )
            raise ConfigError(message, "missing", field=field)
        regions_BPD = batch.regions_BPD.float()
        if self.code is None or batch.region_boxes_BP4 is None:
            return regions_BPD
        return torch.cat([regions_BPD, box_code(batch.region_boxes_BP4, self.code)], dim=2)

    def forward(self, regions_BPD: Tensor) -> ImageFeatures:
        """Return the regions; the pooled vector is the mean of the real ones.

        Raises ConfigError if they have another width.
        """
        if regions_BPD.ndim != 3 or regions_BPD.shape[2] != self.patch_dim:
            message = f"regions must be (B, P, {self.patch_dim}), got {tuple(regions_BPD.shape)}"
            raise ConfigError(message, "mismatch", field="regions_BPD")
        count_B1 = self.real(regions_BPD).sum(dim=1, keepdim=True).clamp(min=1)
        return ImageFeatures(
            pooled_BD=regions_BPD.sum(dim=1) / count_B1, patches_BPD=regions_BPD, grid=None
        )

    def real(self, regions_BPD: Tensor) -> Tensor:
        """(B, P) bool: False for rows of zeros, which pad images with fewer regions than others."""
        return (regions_BPD != 0).any(dim=2)
