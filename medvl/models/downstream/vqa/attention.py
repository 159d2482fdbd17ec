"""Where a fusion-encoder looks in the image while it reads a question: for pictures, and for whoever doubts an answer.

Attention of the last fusion layer, mean over its heads. It says where that layer gathered from, not why an answer was
given: what the cells hold has been mixed by the layers below (Jain and Wallace, arXiv 1902.10186).
"""

import dataclasses

import torch
from torch import Tensor

from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.base import FusionModel
from medvl.schema import Batch

# P cells of the image's grid, row by row from its top left; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuestionAttention:
    """Of each question over the cells of its image, float32. A row sums to at most 1: the rest goes to words, and to
    tokens that stand for no place in the image."""

    pooled_BP: Tensor
    """Of the token whose state the answer is read from."""
    words_BP: Tensor
    """Mean over the question's words, without its first and its closing token; zeros where it has no words."""
    grid: tuple[int, int] | None
    """(rows, columns) of the cells; None for regions of a detector, which lie in no grid."""


@torch.no_grad()
def question_attention(model: FusionModel, batch: Batch) -> QuestionAttention:
    """The attention of a batch's texts over their images; neither padding nor the rest of the batch changes it.

    A pass of its own through both encoders and all fusion layers but the last: the forward pass keeps no weights.

    Raises ConfigError when the model is in training mode, where cells may be left out.
    """
    if model.training:
        raise ConfigError("attention is looked at in eval mode, where nothing is left to chance: call eval() first")
    text = model.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)
    looks = model.looks(text, model.images_of_rows(batch))
    words_BT = _words(batch).float()
    count_B1 = words_BT.sum(dim=1, keepdim=True).clamp(min=1)
    words_BP = torch.einsum("bt,btp->bp", words_BT / count_B1, looks.text_BTP)
    if not isinstance(model.image_encoder, ImageEncoder):
        return QuestionAttention(pooled_BP=looks.pooled_BP, words_BP=words_BP, grid=None)
    height, width = batch.image_BCHW.shape[2:]
    grid = model.image_encoder.grid(height, width)
    if batch.has_image_B is not None and not batch.has_image_B.any():  # no image was encoded: there are no cells
        nowhere_BP = words_BP.new_zeros(len(batch), grid[0] * grid[1])
        return QuestionAttention(pooled_BP=nowhere_BP, words_BP=nowhere_BP, grid=grid)
    return QuestionAttention(pooled_BP=looks.pooled_BP, words_BP=words_BP, grid=grid)


def _words(batch: Batch) -> Tensor:
    """(B, T) bool: real tokens but the first and the last, which a tokenizer puts around every text."""
    place_T = torch.arange(batch.mask_BT.shape[1], device=batch.mask_BT.device)
    last_B1 = batch.mask_BT.sum(dim=1, keepdim=True) - 1
    words_BT = batch.mask_BT.bool() & (place_T > 0) & (place_T < last_B1)
    return words_BT if batch.has_text_B is None else words_BT & batch.has_text_B[:, None]
