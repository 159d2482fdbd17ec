"""Learned prompts in place of a missing image or text (PTUnifier).

Letters: B batch, Q width of a query, R prompts in the pool, K selected prompts, D width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses.precision import full_precision
from medvl.models.bert_init import INIT_STD
from medvl.models.fusion_encoders.parts.encoder import Tokens


class PromptPool(nn.Module):
    """A pool of learned vectors. Each sample gets the vectors that are most similar to its query.

    Gradients reach the selected vectors; the selection itself has none. A query of another width is mapped by a fixed
    random matrix.

    Args:
        size: R.
        width: D.
        selected: K, at most R.
        query_width: Q.
    """

    def __init__(self, size: int, width: int, selected: int, query_width: int) -> None:
        super().__init__()
        self.selected = selected
        self.prompts_RD = nn.Parameter(torch.empty(size, width).normal_(std=INIT_STD))
        self.map_QD: Tensor | None
        same = query_width == width
        self.register_buffer("map_QD", None if same else torch.randn(query_width, width) / query_width**0.5)

    def forward(self, query_BQ: Tensor) -> Tensor:
        """(B, K, D): the prompts with the largest dot products, largest first."""
        with torch.no_grad(), full_precision(query_BQ):
            query_BD = query_BQ.float() if self.map_QD is None else query_BQ.float() @ self.map_QD
            chosen_BK = (query_BD @ self.prompts_RD.float().T).topk(self.selected, dim=1).indices
        return F.embedding(chosen_BK, self.prompts_RD)


def mean_of_tokens(states_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """(B, D): mean of the real tokens, zeros if there is none."""
    weight_BN1 = mask_BN[:, :, None].to(states_BND.dtype)
    return (states_BND * weight_BN1).sum(dim=1) / weight_BN1.sum(dim=1).clamp(min=1)


def lacking(has_B: Tensor | None, has_other_B: Tensor | None) -> Tensor | None:
    """Return bool: samples without the one and with the other; None: there is none."""
    if has_B is None:
        return None
    return ~has_B if has_other_B is None else ~has_B & has_other_B


def fill(tokens: Tokens, lacking_B: Tensor | None, make: Callable[[Tensor], Tokens], query_BQ: Tensor) -> Tokens:
    """Put what `make` returns for the queries of some rows in place of these rows."""
    index_M = None if lacking_B is None else lacking_B.nonzero().squeeze(1)
    if index_M is None or len(index_M) == 0:
        return tokens
    return tokens.replaced(index_M, make(query_BQ[index_M]))


def mean_words(encoder: TextEncoder, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, D): mean of each text's embedded tokens without the first."""
    return mean_of_tokens(encoder.embed(ids_BT, mask_BT)[:, 1:], mask_BT[:, 1:])


def encode_between(encoder: TextEncoder, prompts_BKD: Tensor, first_id: int, last_id: int) -> Tensor:
    """(B, 1 + K + 1, D): states of prompts as a text between two real tokens, which both have the first position."""
    ends_B1D = []
    for token_id in (first_id, last_id):
        ids_B1 = torch.full(prompts_BKD.shape[:1], token_id, device=prompts_BKD.device)[:, None]
        ends_B1D.append(encoder.embed(ids_B1, torch.ones_like(ids_B1, dtype=torch.bool)))
    hidden_BTD = torch.cat([ends_B1D[0], prompts_BKD.to(ends_B1D[0].dtype), ends_B1D[1]], dim=1)
    return encoder.encode(hidden_BTD, torch.ones_like(hidden_BTD[:, :, 0], dtype=torch.bool))[-1]


def with_mean_patches(
    encoder: ImageEncoder, has_image_B: Tensor | None, encode: Callable[[], Tokens]
) -> tuple[Tokens, Tensor]:
    """Run `encode`; return its tokens and the mean of each image's embedded patches (B, D), zeros without an image."""
    with encoder.record_patches() as recorded:
        image = encode()
    mean_BD = image.states_BND.new_zeros(len(image.states_BND), encoder.patch_dim)
    if not recorded:  # no sample has an image
        return image, mean_BD
    (patches_KPD,) = recorded
    mean_KD = patches_KPD.mean(dim=1).to(mean_BD.dtype)
    return image, mean_KD if has_image_B is None else mean_BD.index_copy(0, has_image_B.nonzero().squeeze(1), mean_KD)
