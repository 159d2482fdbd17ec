"""Where a dual-encoder finds a phrase in an image: maps in the pixels of the image before the transform.

A model that has maps of its own (GLoRIA's attention of words) is asked for them. A map of similarity is the cosine of
the phrase with every patch of the last grid, each patch taken through the head that the pooled image goes through; of a
model that compares regions with words, the cosine of each region with the word of the phrase that it fits best.

Shape letters: B pairs of an image and a phrase, W words, P patches, E shared embedding, h and w cells of the grid.
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.models import DualEncoder
from medvl.models.heatmaps import on_image
from medvl.schema import Embeddings

Maps = Literal["attention", "similarity"]
Size = tuple[int, int]


@runtime_checkable
class Attends(Protocol):
    """A model with maps of its own."""

    def attention_maps(
        self, image_BCHW: Tensor, texts: Sequence[str], original_sizes: Sequence[Size] | None = None
    ) -> list[Tensor]:
        """One map (H, W) a pair, NaN where the model was not shown the image."""


def choose_maps(model: DualEncoder, wanted: Maps | None) -> Maps:
    """`wanted`, or the model's own where that is None and it has some. Raises `EvaluationError`."""
    own = isinstance(model, Attends)
    if wanted is None:
        return "attention" if own else "similarity"
    if wanted not in get_args(Maps):
        raise EvaluationError(f"maps are {wanted!r}: choose one of {', '.join(get_args(Maps))}")
    if wanted == "attention" and not own:
        raise EvaluationError(f"{model.name} has no attention of words to regions: take the maps of similarity")
    return wanted


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
    """Where each image shows its phrase: one map (H, W) a pair, float32, NaN where the model was not shown the image.

    Args:
        model: in eval mode.
        image_BCHW: as its `transform` made them, on its device.
        phrases: of each image its own.
        sizes: (height, width) of the images before `transform`.
        maps: "attention" or "similarity".
        smoothing: standard deviation, in cells of the grid, of a Gaussian over the map of similarity (BioViL: 1.5).

    Raises `EvaluationError` when the model's patches cannot be compared with texts.
    """
    if maps == "attention":
        assert isinstance(model, Attends)
        return model.attention_maps(image_BCHW, phrases, sizes)
    patches_BPE, grid = embed_patches(model, image_BCHW)
    similarity_BP = best_cosine(patches_BPE, model.embed_texts(phrases))
    map_Bhw = smooth(similarity_BP.unflatten(1, grid), smoothing)
    boxes = [model.transform.box(*size) for size in sizes]
    return [on_image(map_hw[None], box, *size)[0] for map_hw, box, size in zip(map_Bhw, boxes, sizes, strict=True)]


def best_cosine(patches_BPE: Tensor, texts: Embeddings) -> Tensor:
    """(B, P): of each patch with its text's vector; with the best of its words where the model has words."""
    patches_BPE = F.normalize(patches_BPE.float(), dim=2)
    whole_BP = (patches_BPE @ texts.global_NE[:, :, None])[:, :, 0]
    if texts.local_NPE is None:
        return whole_BP
    cosine_BWP = F.normalize(texts.local_NPE.float(), dim=2) @ patches_BPE.transpose(1, 2)
    if texts.mask_NP is None:
        return cosine_BWP.amax(dim=1)
    best_BP = cosine_BWP.masked_fill(~texts.mask_NP[:, :, None], -torch.inf).amax(dim=1)
    return torch.where(texts.mask_NP.any(dim=1)[:, None], best_BP, whole_BP)  # a text may have no word


def embed_patches(model: DualEncoder, image_BCHW: Tensor) -> tuple[Tensor, Size]:
    """Patches in the space of texts (B, P, E), not normalised, and their grid (h, w).

    Regions that the model itself compares with texts, else the encoder's last grid through what the pooled vector goes
    through: the model's head, or the encoder's own projection. Raises `EvaluationError` where neither takes a patch.
    """
    local_BPE = model.embed_images(image_BCHW).local_NPE
    if local_BPE is not None:
        side = math.isqrt(local_BPE.shape[1])  # a transform makes squares
        return local_BPE, (side, local_BPE.shape[1] // side)
    encoder = model.image_encoder
    features = encoder(image_BCHW)
    if features.patches_BPD is None or features.grid is None:
        raise EvaluationError(f"{encoder.name} has no grid of patches: phrases cannot be looked for in its images")
    if encoder.patch_dim == encoder.feature_dim:
        return model.image_head(features.patches_BPD), features.grid
    projection = getattr(encoder.backbone, "proj", None)
    if isinstance(projection, Tensor) and projection.shape == (encoder.patch_dim, encoder.feature_dim):
        return model.image_head(features.patches_BPD @ projection), features.grid
    raise EvaluationError(
        f"the patches of {encoder.name} ({encoder.patch_dim} dimensions) are not what its pooled vector "
        f"({encoder.feature_dim}) is made of, so its head cannot take them"
    )


def smooth(map_Bhw: Tensor, sigma: float) -> Tensor:
    """(B, h, w): a Gaussian over the cells of each map, whose edges are continued; 0 leaves them as they are.

    Raises `EvaluationError` when `sigma`, in cells, is negative.
    """
    if sigma < 0:
        raise EvaluationError(f"smoothing must not be negative, got {sigma:g}")
    if sigma == 0:
        return map_Bhw
    place_h, place_w = (torch.arange(cells, device=map_Bhw.device) for cells in map_Bhw.shape[1:])
    down_hh, across_ww = (_gaussian(place, sigma) for place in (place_h, place_w))
    return down_hh @ map_Bhw @ across_ww.T


def _gaussian(place_C: Tensor, sigma: float) -> Tensor:
    """(C, C): what each cell takes of each cell, in sum 1; what lies beyond an edge is the cell at the edge."""
    reach = math.ceil(4 * sigma)
    offset_K = torch.arange(-reach, reach + 1, device=place_C.device)
    weight_K = torch.exp(-0.5 * (offset_K / sigma) ** 2)
    source_CK = (place_C[:, None] + offset_K).clamp(0, len(place_C) - 1)
    taken_CC = torch.zeros(len(place_C), len(place_C), device=place_C.device)
    return taken_CC.scatter_add_(1, source_CK, (weight_K / weight_K.sum()).expand(len(place_C), -1))
