"""Attention masks against their definitions, cell by cell."""

import pytest
import torch
from torch import Tensor

from medvl.models.fusion_encoders.parts.encoder import Tokens, stream_mask
from medvl.models.fusion_encoders.parts.transformer import (
    ATTENTIONS,
    attention_mask,
    open_empty_rows,
)

IMAGES, TEXTS = 4, 5
IMAGE_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
TEXT_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
SEQ2SEQ = torch.tensor([True, False, True])


def sees(attention: str, query: int, key: int) -> bool:
    """Return whether a query may attend to a key."""
    from_image, to_image = query < IMAGES, key < IMAGES
    if attention == "bidirectional":
        return True
    if attention == "non_cross":
        return from_image == to_image
    if from_image:
        return True if attention == "bar" else to_image
    return to_image or key <= query


def naive(attention: str) -> Tensor:
    mask_BSS = torch.zeros(3, IMAGES + TEXTS, IMAGES + TEXTS, dtype=torch.bool)
    real_BS = torch.cat([IMAGE_MASK, TEXT_MASK], dim=1)
    for row in range(3):
        kind = attention
        if attention == "mixed":
            kind = "seq2seq" if SEQ2SEQ[row] else "bidirectional"
        for query in range(IMAGES + TEXTS):
            for key in range(IMAGES + TEXTS):
                mask_BSS[row, query, key] = sees(kind, query, key) and bool(real_BS[row, key])
    return mask_BSS


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_masks_equal_their_definitions(attention: str) -> None:
    mask_BSS = attention_mask(attention, IMAGE_MASK, TEXT_MASK, SEQ2SEQ)
    assert mask_BSS.dtype == torch.bool
    assert torch.equal(mask_BSS, naive(attention))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_row_attends_to_padding(attention: str) -> None:
    """MedViLL's released BAR mask lets image rows attend to padding."""
    mask_BSS = attention_mask(attention, IMAGE_MASK, TEXT_MASK, SEQ2SEQ)
    padding_BS = ~torch.cat([IMAGE_MASK, TEXT_MASK], dim=1)
    assert not (mask_BSS & padding_BS[:, None, :]).any()


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        attention_mask("sideways", IMAGE_MASK, TEXT_MASK)
    with pytest.raises(ValueError, match="needs seq2seq_B"):
        attention_mask("mixed", IMAGE_MASK, TEXT_MASK)


def test_empty_rows_are_opened() -> None:
    mask_BSS = attention_mask("non_cross", IMAGE_MASK, TEXT_MASK)
    opened_BSS = open_empty_rows(mask_BSS)
    assert opened_BSS.any(dim=-1).all()
    assert opened_BSS[2, :IMAGES].all()  # the sample without an image
    assert torch.equal(opened_BSS[:2], mask_BSS[:2])


def test_mixed_mask_is_drawn_for_each_sample_and_bidirectional_at_share_zero() -> None:
    """As in MedViLL's released data set."""
    text = Tokens(torch.zeros(200, 3, 1), None)
    image = Tokens(torch.zeros(200, 2, 1), None)
    torch.manual_seed(0)
    mask_BSS = stream_mask("mixed", text, image, 0.25)
    assert mask_BSS is not None
    assert 0.15 < (~mask_BSS[:, 0, 4]).float().mean() < 0.35
    everything = stream_mask("mixed", text, image, 0.0)
    assert everything is not None
    assert everything.all()
    assert stream_mask("bidirectional", text, image, 0.0) is None
