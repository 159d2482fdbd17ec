"""Attention maps of a question over its image, for plots and for checking answers.

Maps are the attention of the last fusion layer, mean over its heads. They show where that layer
gathers information, not why an answer was given: the layers below have mixed the cells already
(Jain and Wallace, arXiv 1902.10186).
"""

import dataclasses

import torch
from torch import Tensor

from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.schema import Batch

# P cells of the image's grid in row-major order; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuestionAttention:
    """Attention of each question over the cells of its image, float32.

    A row sums to at most 1: the rest goes to words, and to tokens without a place in the image.
    """

    pooled_BP: Tensor
    """From the token that is pooled for the answer."""
    words_BP: Tensor
    """Mean over the question's words, without its first and its closing token; zeros if it has
    no words.
    """
    grid: tuple[int, int] | None
    """(rows, columns) of the cells; None for the regions of a detector."""


@torch.no_grad()
def question_attention(model: FusionModel, batch: Batch) -> QuestionAttention:
    """Return the attention of a batch's texts over their images.

    It does not depend on padding or on the rest of the batch. The forward pass keeps no weights, so
    this is a separate pass through both encoders and all fusion layers but the last.

    Raises ConfigError in training mode, where cells may be left out, and for a model that reads
    earlier images, whose cells are beside those of the image.
    """
    if model.training:
        raise ConfigError("attention maps need eval mode; call eval() first", "conflict")
    if model.image_times is not None:
        message = "attention maps are of one image; take a model without earlier_image"
        raise ConfigError(message, "unsupported", field="earlier_image")
    text = model.texts_of(batch)
    maps = model.cross_attention(text, model.images_of_rows(batch))
    words_BT = _words(batch).float()
    count_B1 = words_BT.sum(dim=1, keepdim=True).clamp(min=1)
    words_BP = torch.einsum("bt,btp->bp", words_BT / count_B1, maps.text_BTP)
    if not isinstance(model.image_encoder, ImageEncoder):
        return QuestionAttention(pooled_BP=maps.pooled_BP, words_BP=words_BP, grid=None)
    height, width = batch.image_BCHW.shape[2:]
    grid = model.image_encoder.grid(height, width)
    # no image was encoded: there are no cells
    if batch.has_image_B is not None and not batch.has_image_B.any():
        cells = words_BP.shape[1] if grid is None else grid[0] * grid[1]
        zeros_BP = words_BP.new_zeros(len(batch), cells)
        return QuestionAttention(pooled_BP=zeros_BP, words_BP=zeros_BP, grid=grid)
    return QuestionAttention(pooled_BP=maps.pooled_BP, words_BP=words_BP, grid=grid)


def _words(batch: Batch) -> Tensor:
    """(B, T) bool: real tokens without the first and the last, which a tokenizer adds to every
    text.
    """
    place_T = torch.arange(batch.mask_BT.shape[1], device=batch.mask_BT.device)
    last_B1 = batch.mask_BT.sum(dim=1, keepdim=True) - 1
    words_BT = batch.mask_BT.bool() & (place_T > 0) & (place_T < last_B1)
    return words_BT if batch.has_text_B is None else words_BT & batch.has_text_B[:, None]
