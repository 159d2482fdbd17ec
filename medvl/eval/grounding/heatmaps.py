"""Heatmaps of a phrase from a dual-encoder, in pixels of the image before the transform.

"attention" maps come from models that have them (GLoRIA's attention of words to regions). A
"similarity" map is the cosine of the phrase with every patch of the last grid, each patch projected
by the head of the pooled image; for models that compare regions with words, the maximum over the
phrase's words of the cosine with each region.

Shape letters: B pairs of an image and a phrase, W words, P patches, E shared embedding, h and w
cells of the grid.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.data.annotations import Phrase, published_size
from medvl.data.transforms.image import Box
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import embed_texts
from medvl.eval.zero_shot_classification.prompts import ClassPrompts
from medvl.models import DualEncoder
from medvl.models.base import System
from medvl.models.heatmaps import on_image
from medvl.schema import Embeddings, Sample

Maps = Literal["attention", "similarity"]
Size = tuple[int, int]


@runtime_checkable
class HasAttentionMaps(Protocol):
    """A model with attention maps."""

    def attention_maps(
        self, image_BCHW: Tensor, texts: Sequence[str], original_sizes: Sequence[Size] | None = None
    ) -> list[Tensor]:
        """Return one map (H, W) per pair, NaN outside of the model's crop."""


@runtime_checkable
class HasRegions(Protocol):
    """A model whose regions are in the space of texts and not part of its embeddings (BioViL)."""

    def embed_regions(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, E), a square grid in row-major order."""


def choose_maps(model: DualEncoder, maps: Maps | None) -> Maps:
    """Return `maps`, or if None the model's default. Raises `EvaluationError` if the model does
    not support it.
    """
    has_attention = isinstance(model, HasAttentionMaps)
    if maps is None:
        return "attention" if has_attention else "similarity"
    check_choice(maps, get_args(Maps), "maps", error=EvaluationError)
    if maps == "attention" and not has_attention:
        message = f"{model.name} has no attention of words to regions: use maps='similarity'"
        raise EvaluationError(message, "unsupported", field="maps")
    return maps


@torch.no_grad()
def phrase_maps(
    model: DualEncoder,
    image_BCHW: Tensor,
    phrases: Sequence[str],
    sizes: Sequence[Size],
    *,
    maps: Maps,
    smoothing: float = 0.0,
) -> list[Tensor]:
    """Return one map (H, W) per pair, float32, NaN outside of the model's crop.

    Args:
        model: in eval mode.
        image_BCHW: output of the model's `transform`, on its device.
        phrases: one for each image.
        sizes: (height, width) of the images before `transform`.
        maps: "attention" or "similarity".
        smoothing: standard deviation, in cells of the grid, of a Gaussian over similarity maps
            (BioViL: 1.5).

    Raises EvaluationError if the model's patches cannot be compared with texts.
    """
    if maps == "attention":
        assert isinstance(model, HasAttentionMaps)
        return model.attention_maps(image_BCHW, phrases, sizes)
    patches_BPE, grid = embed_patches(model, image_BCHW)
    similarity_BP = best_cosine(patches_BPE, model.embed_texts(phrases))
    map_Bhw = smooth(similarity_BP.unflatten(1, grid), smoothing)
    boxes = [model.transform.box(*size) for size in sizes]
    return [
        on_image(map_hw[None], box, *size)[0]
        for map_hw, box, size in zip(map_Bhw, boxes, sizes, strict=True)
    ]


def best_cosine(patches_BPE: Tensor, texts: Embeddings) -> Tensor:
    """Return (B, P): the cosine of each patch with the text, or with its best word if the model has
    word embeddings.

    Raises EvaluationError if the model has no common space of patches and texts.
    """
    dims = patches_BPE.shape[2], texts.global_NE.shape[1]
    if dims[0] != dims[1]:
        message = (
            f"patches have {dims[0]} dimensions and texts {dims[1]}: the model has no "
            f"common space for both"
        )
        raise EvaluationError(message, "unsupported", field="maps")
    patches_BPE = F.normalize(patches_BPE.float(), dim=2)
    global_BP = (patches_BPE @ texts.global_NE[:, :, None])[:, :, 0]
    if texts.local_NPE is None:
        return global_BP
    cosine_BWP = F.normalize(texts.local_NPE.float(), dim=2) @ patches_BPE.transpose(1, 2)
    if texts.mask_NP is None:
        return cosine_BWP.amax(dim=1)
    best_BP = cosine_BWP.masked_fill(~texts.mask_NP[:, :, None], -torch.inf).amax(dim=1)
    # a text may have no word
    return torch.where(texts.mask_NP.any(dim=1)[:, None], best_BP, global_BP)


def embed_patches(model: DualEncoder, image_BCHW: Tensor) -> tuple[Tensor, Size]:
    """Return patches in the space of texts (B, P, E), not normalized, and their grid (h, w).

    These are the regions that the model compares with texts. If it has none, the encoder's last
    grid is projected like the pooled vector: by the model's head, after the encoder's own
    projection if there is one.

    Raises EvaluationError if the encoder has no grid, or its patches do not fit the projection.
    """
    regions: Any = model
    has_own = isinstance(model, HasRegions)
    local_BPE = (
        regions.embed_regions(image_BCHW) if has_own else model.embed_images(image_BCHW).local_NPE
    )
    if local_BPE is not None:
        side = math.isqrt(local_BPE.shape[1])  # transforms produce square images
        return local_BPE, (side, local_BPE.shape[1] // side)
    encoder = model.image_encoder
    features = encoder(image_BCHW)
    grid = features.plane
    if features.patches_BPD is None or grid is None:
        message = (
            f"{encoder.name} has no grid of patches, which grounding requires: use "
            f"another image encoder"
        )
        raise EvaluationError(message, "unsupported")
    if encoder.patch_dim == encoder.feature_dim:
        return model.image_head(features.patches_BPD), grid
    projection = getattr(encoder.backbone, "proj", None)
    if isinstance(projection, Tensor) and projection.shape == (
        encoder.patch_dim,
        encoder.feature_dim,
    ):
        return model.image_head(features.patches_BPD @ projection), grid
    message = (
        f"the pooled vector of {encoder.name} is not computed from its patches, so the "
        f"head cannot project them"
    )
    raise EvaluationError(message, "unsupported")


def has_volume_patches(model: System) -> bool:
    """Return whether a model reads volumes and its patches are in the space of texts."""
    transform: Any = model.transform
    return isinstance(transform, VolumeTransform) and isinstance(model, HasRegions)


class VolumeMaps:
    """Maps of texts in volumes, by the patches of a dual-encoder of volumes; texts are encoded
    once.

    The value of a patch (`embed_regions`) is its product with the mean vector of the sentences for
    a text, minus that with the mean of those against it. Values of two volumes or models cannot be
    compared.

    Args:
        model: in eval mode.
        texts: sentences for and against each text, by name.
        normalize: take `normalize_regions` of the patches, so that the value of a sentence is a
            cosine in most systems.

    Raises EvaluationError ("unsupported") for a model without such patches.
    """

    def __init__(
        self, model: System, texts: Mapping[str, ClassPrompts], *, normalize: bool = False
    ) -> None:
        if not has_volume_patches(model):
            raise EvaluationError(
                f"{model.name} has no patches in the space of texts; use hlip, ct_clip, colipri or "
                "fvlm",
                "unsupported",
                field="model",
            )
        self._model: Any = model
        self._normalize = normalize
        self._directions = {
            name: self._mean(sides.positive) - (self._mean(sides.negative) if sides.negative else 0)
            for name, sides in texts.items()
        }

    def _mean(self, texts: Sequence[str]) -> Tensor:
        vectors_ME: Tensor = embed_texts(self._model, texts).global_NE
        return vectors_ME.mean(dim=0)

    @torch.no_grad()
    def patches(self, *volumes: Tensor) -> Tensor:
        """Return patches in the space of texts (B, d, h, w, E) float32.

        Args:
            volumes: arguments of the model's `embed_images`, on its device.
        """
        regions_BPE = self._model.embed_regions(*volumes).float()
        if self._normalize:
            regions_BPE = self._model.normalize_regions(regions_BPE)
        patches: Tensor = regions_BPE.unflatten(1, self._model.image_encoder.grid)
        return patches

    @torch.no_grad()
    def values(self, patches_dhwE: Tensor, names: Sequence[str]) -> Tensor:
        """Return (L, d, h, w): the values of the patches of one volume for each text.

        Patches outside of the organs that a text names, which are zero, have the lowest value.
        """
        directions_LE = torch.stack([self._directions[name] for name in names])
        value_Ldhw = torch.einsum("dhwe,le->ldhw", patches_dhwE, directions_LE)
        read_Ldhw = torch.einsum("dhwe,le->ldhw", patches_dhwE.abs(), directions_LE.abs()) != 0
        lowest_L = value_Ldhw.masked_fill(~read_Ldhw, torch.inf).amin(dim=(1, 2, 3))
        lowest_L = lowest_L.masked_fill(lowest_L == torch.inf, 0.0)  # of an organ that is not there
        return torch.where(read_Ldhw, value_Ldhw, lowest_L[:, None, None, None])


def smooth(map_Bhw: Tensor, sigma: float) -> Tensor:
    """Return (B, h, w): a Gaussian over the cells of each map, reflected at the edges; 0 returns
    the input.

    Equal to `scipy.ndimage.gaussian_filter` with its defaults, which BioViL uses. Raises
    `EvaluationError` if `sigma`, in cells, is negative.
    """
    if sigma < 0:
        raise EvaluationError(
            f"expected smoothing of 0 or more, got {sigma:g}", "out_of_range", field="smoothing"
        )
    if sigma == 0:
        return map_Bhw
    index_h, index_w = (torch.arange(cells, device=map_Bhw.device) for cells in map_Bhw.shape[1:])
    down_hh, across_ww = (_gaussian(index, sigma) for index in (index_h, index_w))
    return down_hh @ map_Bhw @ across_ww.T


def _gaussian(index_C: Tensor, sigma: float) -> Tensor:
    """Return (C, C): the weight of each input cell for each output cell, reflected at the edges;
    rows sum to 1.
    """
    reach = int(4 * sigma + 0.5)
    offset_K = torch.arange(-reach, reach + 1, device=index_C.device)
    weight_K = torch.exp(-0.5 * (offset_K / sigma) ** 2)
    # cells a b c, reflected: a b c c b a a b ...
    source_CK = (index_C[:, None] + offset_K) % (2 * len(index_C))
    source_CK = torch.minimum(source_CK, 2 * len(index_C) - 1 - source_CK)
    kernel_CC = torch.zeros(len(index_C), len(index_C), device=index_C.device)
    return kernel_CC.scatter_add_(
        1, source_CK, (weight_K / weight_K.sum()).expand(len(index_C), -1)
    )


# Metrics of one map against the boxes of one phrase: contrast-to-noise ratio, pointing game, IoU
# at thresholds.
#
# A map is NaN outside of the model's crop. The treatment of these pixels is a named rule:
#
# * "background": they get the lowest value of the map, so a finding outside of the crop counts as
#   missed;
# * "drop": they are left out of all metrics; a phrase whose boxes are entirely outside of the
#   crop has no values.
#
# H, W pixels of the image, P those that are compared.

Unseen = Literal["background", "drop"]
Scale = Literal["unit", "signed", "none"]

_TIE_TOLERANCE = 1e-6
"""Pixels within this share of the map's range below its maximum count as maximal, to be robust
to rounding.
"""

_ROUNDING = 1e-6
"""A map whose range is at most this share of its largest absolute value is constant:
interpolation rounds float32.
"""

# minimum noise as a share of the contrast, so that the CNR of a map with two values is finite
_MIN_NOISE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MapRules:
    """Rules for comparing a map with boxes."""

    unseen: Unseen = "background"
    scale: Scale = "unit"
    """Scaling before thresholds: "unit" to 0..1, "signed" to -1..1 (MaCo's code), "none" keeps
    cosines unscaled.
    """
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Thresholds of the mean IoU. The default is BioViL's, which applies to unscaled cosines
    (`protocols`).
    """

    def __post_init__(self) -> None:
        check_choice(self.unseen, get_args(Unseen), "unseen", error=EvaluationError)
        check_choice(self.scale, get_args(Scale), "scale", error=EvaluationError)
        if not self.thresholds or len(set(self.thresholds)) != len(self.thresholds):
            message = f"expected one or more distinct thresholds, got {list(self.thresholds)}"
            raise EvaluationError(message, "out_of_range", field="thresholds")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values of `map_metrics`, in order."""
        return (
            "cnr",
            "signed_cnr",
            "pointing_game",
            "miou",
            *(f"iou@{threshold:g}" for threshold in self.thresholds),
        )


def map_metrics(
    map_HW: NDArray[np.floating], inside_HW: NDArray[np.bool_], rules: MapRules
) -> Mapping[str, float]:
    """Return the values of `rules.metrics` for one map, by name; NaN where one is not defined.

    * "cnr": |m_in - m_out| / sqrt(v_in + v_out), with means and variances inside and outside of the
      boxes. This is the published definition, which is also high for a map that avoids the finding;
      "signed_cnr" is then negative. It is 0 for a constant map.
    * "pointing_game": 1 if the maximum is inside the boxes. Ties count by the share of maximal
      pixels inside, so a constant map scores like a random guess.
    * "iou@t": IoU of the boxes and the pixels at or above t, after scaling; "miou" is their mean
      over thresholds. For a constant map it is 0 if maps are scaled; else all pixels or none are
      above a threshold.

    Raises EvaluationError if the sizes differ, no pixel is inside, or the map is all NaN.
    """
    seen_HW = np.isfinite(map_HW)
    if map_HW.shape != inside_HW.shape or not inside_HW.any() or not seen_HW.any():
        message = (
            f"expected a map and a nonempty region of one size, got {map_HW.shape} and "
            f"{inside_HW.shape}"
        )
        raise EvaluationError(message, "mismatch")
    if rules.unseen == "drop":
        value_P = map_HW[seen_HW].astype(np.float64)
        inside_P = inside_HW[seen_HW]
    else:
        value_P = np.where(seen_HW, map_HW, map_HW[seen_HW].min()).ravel().astype(np.float64)
        inside_P = inside_HW.ravel()
    if not inside_P.any():
        return dict.fromkeys(rules.metrics, float("nan"))
    if is_constant(value_P):
        value_P[:] = value_P[0]
    signed = _contrast(value_P, inside_P)
    overlaps = [_overlap(scaled_P, inside_P) for scaled_P in _above(value_P, rules)]
    numbers = (
        abs(signed),
        signed,
        _pointing(value_P, inside_P),
        float(np.mean(overlaps)),
        *overlaps,
    )
    return dict(zip(rules.metrics, numbers, strict=True))


def is_constant(value_P: NDArray[np.floating]) -> bool:
    """Return whether all values of a float32 map are equal, up to the rounding of its
    interpolation.
    """
    return bool(np.ptp(value_P) <= _ROUNDING * np.abs(value_P).max())


def region_mask(boxes: Sequence[Box], height: int, width: int) -> NDArray[np.bool_]:
    """Return (H, W): True for pixels whose center is inside one of the boxes, given in pixels of
    that image.

    A box that contains no pixel center gets the pixel at its own center.
    """
    inside_HW = np.zeros((height, width), np.bool_)
    for box in boxes:
        rows = _span(box.top, box.height, height)
        columns = _span(box.left, box.width, width)
        inside_HW[rows, columns] = True
    return inside_HW


def stored_boxes(phrase: Phrase, sample: Sample, size: tuple[int, int]) -> list[Box]:
    """Return the boxes of a phrase in pixels of the stored image of `size` (height, width)."""
    published = published_size(sample)
    down = size[0] / published[0]
    across = size[1] / published[1]
    scales = {"y": down, "x": across, "height": down, "width": across}
    return [
        Box(*(float(str(box[name])) * scale for name, scale in scales.items()))
        for box in phrase.boxes
    ]


def _span(start: float, length: float, pixels: int) -> slice:
    first = _first_center(start)
    last = _first_center(start + length)
    if last <= first:
        first = int(start + length / 2)
        last = first + 1
    first = min(max(first, 0), pixels - 1)
    return slice(first, max(min(last, pixels), first + 1))


def _first_center(coordinate: float) -> int:
    """Return the first pixel whose center is at or after a coordinate."""
    return int(np.ceil(coordinate - 0.5))


def _contrast(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    if inside_P.all():
        return float("nan")  # the boxes cover the image: there is no outside
    if value_P.min() == value_P.max():
        return 0.0  # the two means differ by rounding
    within = value_P[inside_P]
    without = value_P[~inside_P]
    difference = within.mean() - without.mean()
    noise = max(np.sqrt(within.var() + without.var()), _MIN_NOISE * abs(difference))
    return float(difference / noise) if noise > 0 else 0.0


def _pointing(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    highest = value_P.max()
    return float(inside_P[value_P >= highest - _TIE_TOLERANCE * (highest - value_P.min())].mean())


def _above(value_P: NDArray[np.float64], rules: MapRules) -> list[NDArray[np.bool_]]:
    """Return, for each threshold, which pixels are at or above it."""
    lowest = value_P.min()
    highest = value_P.max()
    if rules.scale == "none":
        return [value_P >= threshold for threshold in rules.thresholds]
    if highest == lowest:
        return [np.zeros(len(value_P), np.bool_) for _ in rules.thresholds]
    scaled_P = (value_P - lowest) / (highest - lowest)
    if rules.scale == "signed":
        scaled_P = 2 * scaled_P - 1
    return [scaled_P >= threshold for threshold in rules.thresholds]


def _overlap(above_P: NDArray[np.bool_], inside_P: NDArray[np.bool_]) -> float:
    return float((above_P & inside_P).sum() / (above_P | inside_P).sum())
