"""Who may attend to whom, as boolean tensors: True = may attend.

A single stream is an image block followed by a text block. Its masks are built from those two blocks and the padding of
both, which is and-ed into every one of them, so that no row ever sees a padded key.

Letters: B batch, Q queries, K keys, I tokens of the image block, T tokens of the text block, S = I + T.
"""

import torch
from torch import Tensor

from medvl.models.fusion_encoders.config import ATTENTIONS, Attention


def attention_mask(
    attention: Attention, image_mask_BI: Tensor, text_mask_BT: Tensor, seq2seq_B: Tensor | None = None
) -> Tensor:
    """(B, S, S): whether the query of a row may attend to the key of a column.

    Args:
        attention: "bidirectional": everything sees everything (BERT). "seq2seq": image rows see the image, text rows
            the image and the text up to themselves (UniLM). "bar": as seq2seq, but image rows see the text as well
            (MedViLL's bidirectional auto-regressive mask). "non_cross": each block sees itself alone. "mixed": seq2seq
            or bidirectional, sample by sample.
        image_mask_BI, text_mask_BT: bool, True on real tokens.
        seq2seq_B: bool, the samples of "mixed" that take the sequence-to-sequence mask.

    Raises ValueError on an unknown kind, or on "mixed" without `seq2seq_B`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}: known are {', '.join(ATTENTIONS)}")
    images, texts = image_mask_BI.shape[1], text_mask_BT.shape[1]
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
            raise ValueError("a mixed mask needs seq2seq_B: which samples are sequence-to-sequence")
        return (seq2seq_SS | ~seq2seq_B[:, None, None]) & real_B1S
    return real_B1S.expand(-1, len(place_S), -1)


def padding_mask(mask_BK: Tensor | None) -> Tensor | None:
    """(B, 1, K): every query sees the real keys; None where all are real."""
    return None if mask_BK is None else mask_BK[:, None, :]


def open_empty_rows(mask_BQK: Tensor) -> Tensor:
    """The mask with rows that see nothing made to see everything: softmax over nothing is not a number.

    What such a row gives is of no use, and whoever reads the states leaves it out.
    """
    return mask_BQK | ~mask_BQK.any(dim=-1, keepdim=True)
