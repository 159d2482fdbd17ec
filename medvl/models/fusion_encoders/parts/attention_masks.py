"""Boolean attention masks: True where a query may attend to a key.

A single stream is an image block followed by a text block. Its masks are built from both blocks and
their padding, which is excluded from every mask, so that no row attends to a padded key.

Letters: B batch, Q queries, K keys, I tokens of the image block, T tokens of the text block, S = I
+ T.
"""

from typing import Literal

import torch
from torch import Tensor

Attention = Literal["bidirectional", "seq2seq", "bar", "mixed", "non_cross"]
"""Attention mask of a single stream, see `attention_mask`."""
ATTENTIONS: tuple[Attention, ...] = ("bidirectional", "seq2seq", "bar", "mixed", "non_cross")
CAUSAL_ATTENTIONS: tuple[Attention, ...] = ("seq2seq", "bar", "mixed")
"""Masks under which text is predicted from the image and earlier words, as writing a report
needs.
"""


def attention_mask(
    attention: Attention,
    image_mask_BI: Tensor,
    text_mask_BT: Tensor,
    seq2seq_B: Tensor | None = None,
) -> Tensor:
    """(B, S, S): whether the query of a row may attend to the key of a column.

    Args:
        attention: "bidirectional": everything attends to everything (BERT). "seq2seq": image rows
            attend to the image, text rows to the image and to the text up to themselves (UniLM).
            "bar": as seq2seq, but image rows attend to the text too (MedViLL's bidirectional
            auto-regressive mask). "non_cross": each block attends to itself only. "mixed": seq2seq
            or bidirectional, by sample.
        image_mask_BI, text_mask_BT: bool, True on real tokens.
        seq2seq_B: bool, the samples of "mixed" with the sequence-to-sequence mask.

    Raises ValueError for an unknown kind, and for "mixed" without `seq2seq_B`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
    images = image_mask_BI.shape[1]
    texts = text_mask_BT.shape[1]
    place_S = torch.arange(images + texts, device=image_mask_BI.device)
    is_text_S = place_S >= images
    earlier_SS = place_S[None, :] <= place_S[:, None]
    seq2seq_SS = ~is_text_S[None, :] | (is_text_S[:, None] & earlier_SS)
    real_B1S = torch.cat([image_mask_BI, text_mask_BT], dim=1)[:, None, :]
    if attention == "seq2seq":
        return seq2seq_SS & real_B1S
    if attention == "bar":
        return (seq2seq_SS | ~is_text_S[:, None]) & real_B1S
    if attention == "non_cross":
        return (is_text_S[:, None] == is_text_S[None, :]) & real_B1S
    if attention == "mixed":
        if seq2seq_B is None:
            raise ValueError("attention 'mixed' needs seq2seq_B")
        return (seq2seq_SS | ~seq2seq_B[:, None, None]) & real_B1S
    return real_B1S.expand(-1, len(place_S), -1)


def padding_mask(mask_BK: Tensor | None) -> Tensor | None:
    """(B, 1, K): every query attends to the real keys; None if all are real."""
    return None if mask_BK is None else mask_BK[:, None, :]


def open_empty_rows(mask_BQK: Tensor) -> Tensor:
    """Return the mask with empty rows set to True: a softmax over no keys is NaN.

    The output of such a row is meaningless and must be ignored.
    """
    return mask_BQK | ~mask_BQK.any(dim=-1, keepdim=True)


def keep_first(mask_BT: Tensor, has_text_B: Tensor | None) -> Tensor:
    """(B, T) bool: the mask of texts; of a sample without a text, the first token (CLS) remains.

    Layers that normalise a token of zeros would have gradients near 1 / epsilon.
    """
    real_BT = mask_BT if has_text_B is None else mask_BT & has_text_B[:, None]
    is_first_T = torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0
    return real_BT | is_first_T
