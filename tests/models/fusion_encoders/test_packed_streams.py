"""Packed texts in fusion-encoders: losses and gradients of padded ones, with less arithmetic."""

from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.fusion_samples import TINY, flags, make_batch, shaken, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.encoders.text.packing import Packing
from medvl.models.fusion_encoders.parts.transformer import CoAttentionLayer, Sizes, padding_mask
from medvl.train.loop.step import prepare

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STREAMS = ("albef", "m2i2", "mumc", "m3ae", "arl", "ptunifier", "dual_stream")
"""Systems whose text has a stream of its own."""


def model_of(name: str) -> Any:
    text = {**TINY[name]["text_arguments"], **NO_DROPOUT}
    dropout = (
        {}
        if name in ("berthop", "medvill", "pixelbert", "uniter", "vilt", "visualbert")
        else {"dropout": 0.0}
    )
    return shaken(tiny_model(name, tiny_tokenizer(), text_arguments=text, **dropout))


def losses_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the total loss of a batch in which a text and an image are missing, and its
    gradients.
    """
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = make_batch(
        model.tokenizer, has_text_B=flags(1, 0, 1, 1, 1, 1), has_image_B=flags(1, 1, 0, 1, 1, 1)
    )
    torch.manual_seed(1)
    model.before_step(0)
    total = model(batch).total
    total.backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    model.load_state_dict(state)
    return total.detach(), gradients


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_a_text_without_tokens_is_read_as_padded(name: str, tmp_path: Any) -> None:
    """Loaders give each text CLS and SEP; other callers may not."""
    model = model_of(name)
    batch = make_batch(model.tokenizer)
    batch.mask_BT[1] = False
    found = []
    for packed in (False, True):
        prepare(model, fakes.config(tmp_path, packed_text=packed), torch.device("cpu"))
        fused = model.eval().features(batch)
        found.append((fused.pooled_BD, fused.image.states_BND))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def fusion_flops(model: Any) -> int:
    """Return the arithmetic of fusing texts of unequal length with their images."""
    batch = make_batch(model.tokenizer)
    text, image = (
        model.text_tokens(batch.ids_BT, batch.mask_BT),
        model.image_tokens(batch.image_BCHW),
    )
    with FlopCounterMode(display=False) as counter:
        model.fuse(text, image)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", STREAMS)
def test_packed_streams_have_the_losses_of_padded_ones(name: str, tmp_path: Any) -> None:
    model = model_of(name)
    prepare(model, fakes.config(tmp_path), torch.device("cpu"))
    (expected, padded), flops = losses_of(model), fusion_flops(model)
    prepare(model, fakes.config(tmp_path, packed_text=True), torch.device("cpu"))
    actual, packed = losses_of(model)
    torch.testing.assert_close(actual, expected)
    assert packed.keys() == padded.keys()
    for parameter, gradient in packed.items():
        torch.testing.assert_close(gradient, padded[parameter], rtol=1e-3, atol=1e-5, msg=parameter)
    assert fusion_flops(model) < 0.9 * flops


def test_a_layer_reads_packed_sequences_as_padded_ones() -> None:
    torch.manual_seed(0)
    layer = CoAttentionLayer(Sizes(8, 1, 2, 16), context_width=6)
    states_BND, other_BKD = torch.randn(3, 5, 8), torch.randn(3, 4, 6)
    mask_BN, other_mask_BK = (
        torch.arange(size) < torch.tensor([[size], [1], [2]]) for size in (5, 4)
    )
    expected_BND = layer(states_BND, other_BKD, mask_BN, other_mask_BK)
    own, other = Packing.from_mask(mask_BN), Packing.from_mask(other_mask_BK)
    packed_RD = layer(
        own.pack(states_BND), other.pack(other_BKD), mask_BN, other_mask_BK, own, other
    )
    assert packed_RD.shape == (8, 8)
    torch.testing.assert_close(own.unpack(packed_RD)[mask_BN], expected_BND[mask_BN])
    kept = layer.cross_attention.keys_values(other.pack(other_BKD), other)
    crossed_RD = layer.cross_attention.attend(
        own.pack(states_BND), kept, padding_mask(other_mask_BK), own
    )
    crossed_BND = layer.cross_attention(states_BND, other_BKD, padding_mask(other_mask_BK))
    torch.testing.assert_close(crossed_RD, crossed_BND[mask_BN])
