"""Sentence features from the features of their tokens.

width = most_slots(batch.sentence_BT)                       # waits for the device
sentences_BSD, mask_BS = pool_sentences(features.tokens_BTD, batch.sentence_BT, width)
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.checks import check_choice
from medvl.models.dual_encoders.parts.words import most_slots, sum_by_slot

SentencePool = Literal["max", "mean"]


def pool_sentences(
    tokens_BTD: Tensor, sentence_BT: Tensor, width: int | None = None, pool: SentencePool = "max"
) -> tuple[Tensor, Tensor]:
    """Return (sentences_BSD, mask_BS): maximum or mean of the tokens of each sentence, in float32; S is `width`.

    Args:
        tokens_BTD: features of tokens.
        sentence_BT: `Batch.sentence_BT`: number of each token's sentence, from 0; -1 outside of sentences, where tokens
            are ignored.
        width: at least the number of sentences of the longest text. None: that number, for which it waits for the
            device.
        pool: "max" as in LoVT (arXiv 2112.02889, section 3.3). Tokens that share the maximum share its gradient.

    A sentence without tokens, also between others, has zeros and is False in the mask. Raises ConfigError on an unknown
    pool.
    """
    check_choice(pool, get_args(SentencePool), "pool")
    width = most_slots(sentence_BT) if width is None else width
    outside_BT = sentence_BT < 0
    place_BT = sentence_BT.masked_fill(outside_BT, width)
    count_BS = sentence_BT.new_zeros(len(sentence_BT), width + 1)
    count_BS = count_BS.scatter_add(1, place_BT, torch.ones_like(place_BT))[:, :width]
    mask_BS = count_BS > 0
    if pool == "mean":
        sentences_BSD, _ = sum_by_slot(tokens_BTD, sentence_BT, width)
        return sentences_BSD / count_BS.clamp(min=1)[:, :, None], mask_BS
    lowest_BSD = tokens_BTD.new_full((len(tokens_BTD), width + 1, tokens_BTD.shape[2]), -torch.inf, dtype=torch.float32)
    tokens_BTD = tokens_BTD.float().masked_fill(outside_BT[:, :, None], 0.0)
    place_BTD = place_BT[:, :, None].expand_as(tokens_BTD)
    sentences_BSD = lowest_BSD.scatter_reduce(1, place_BTD, tokens_BTD, "amax")[:, :width]
    return sentences_BSD.masked_fill(~mask_BS[:, :, None], 0.0), mask_BS


def mean_of_sentences(tokens_BTD: Tensor, sentence_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Return (B, D) float32: the mean of a text's sentences, each the mean of its tokens.

    A text without a sentence, and every text if `sentence_BT` is None, is one sentence.
    """
    sentence_BT = torch.full_like(mask_BT, -1, dtype=torch.long) if sentence_BT is None else sentence_BT
    sentences_BSD, mask_BS = pool_sentences(tokens_BTD, whole_if_none(sentence_BT, mask_BT), pool="mean")
    return sentences_BSD.sum(dim=1) / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)


def whole_if_none(sentence_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the numbers of sentences, 0 on all tokens but the first and the last of a text that has no sentence.

    A text of nothing but its first and last token has these as its sentence.
    """
    inner_BT = mask_BT & F.pad(mask_BT[:, 1:], (0, 1))
    inner_BT[:, 0] = False
    whole_BT = torch.where(inner_BT.any(dim=1, keepdim=True), inner_BT, mask_BT).to(sentence_BT.dtype) - 1
    return torch.where((sentence_BT >= 0).any(dim=1, keepdim=True), sentence_BT, whole_BT)
