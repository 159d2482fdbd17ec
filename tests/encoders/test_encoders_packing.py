"""Text without padding: the packed form has the padded form's values and gradients, and does less."""

import itertools
from typing import Any

import pytest
import torch
from helpers.tiny_towers import TINY_BERT
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.encoders import create_text_encoder, freeze_layers
from medvl.encoders.text.packing import ATTENTION, Packing, packed_attention
from medvl.errors import ConfigError

FAMILIES = {
    "bert": {},
    "roberta": {},
    "bioalbert": {"embedding_size": 16, "num_hidden_groups": 2},
}
MASKS = {
    "ragged": torch.arange(9) < torch.tensor([9, 1, 4, 7])[:, None],
    "a text without tokens": torch.arange(9) < torch.tensor([3, 0, 9, 1])[:, None],
    "no token at all": torch.zeros(4, 9, dtype=torch.bool),
    "holes": torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) < 0.6,
}


def encoder_of(name: str = "bert", **options: Any) -> Any:
    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return create_text_encoder(name, **{**TINY_BERT, **no_dropout, **FAMILIES.get(name, {}), **options})


def ids() -> Tensor:
    return torch.randint(5, 100, (4, 9), generator=torch.Generator().manual_seed(0))


def run(encoder: Any, mask_BT: Tensor) -> tuple[Any, dict[str, Tensor | None]]:
    """Features, and the gradients of a sum in which every value has a weight of its own."""
    encoder.zero_grad()
    features = encoder(ids(), mask_BT)
    weight_BTD = torch.randn(features.tokens_BTD.shape, generator=torch.Generator().manual_seed(2))
    ((features.tokens_BTD * weight_BTD).sum() + (features.pooled_BD * weight_BTD[:, 0]).sum()).backward()
    return features, {name: parameter.grad for name, parameter in encoder.named_parameters()}


@pytest.mark.fault("N6")
@pytest.mark.parametrize("mask_BT", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_padded_texts(name: str, mask_BT: Tensor) -> None:
    encoder = encoder_of(name, layers=(0, -2, -1), pool="max").train()
    padded, expected = run(encoder, mask_BT)
    encoder.pack()
    packed, gradients = run(encoder, mask_BT)
    torch.testing.assert_close(packed.tokens_BTD, padded.tokens_BTD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.pooled_BD, padded.pooled_BD, rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.mask_BT, padded.mask_BT)
    assert not packed.tokens_BTD[~mask_BT].any()
    for parameter, gradient in gradients.items():
        theirs = expected[parameter]
        assert (gradient is None) == (theirs is None), parameter
        if gradient is not None:
            torch.testing.assert_close(gradient, theirs, rtol=1e-3, atol=1e-4, msg=parameter)


@pytest.mark.fault("N6")
def test_texts_do_not_see_each_other() -> None:
    encoder = encoder_of().eval()
    encoder.pack()
    mask_BT = MASKS["ragged"]
    before = encoder(ids(), mask_BT).tokens_BTD
    changed = ids()
    changed[2] = 7
    after = encoder(changed, mask_BT).tokens_BTD
    assert not torch.equal(after[2], before[2])
    torch.testing.assert_close(after[[0, 1, 3]], before[[0, 1, 3]], rtol=0, atol=1e-6)


def test_padded_again_it_is_as_it_was() -> None:
    encoder = encoder_of().eval()
    expected = encoder(ids(), MASKS["ragged"]).tokens_BTD
    encoder.pack()
    hidden_BTD = encoder.embed(ids(), MASKS["ragged"])  # fusion models go this way: padded, whatever was packed before
    states = encoder.encode(hidden_BTD, MASKS["ragged"])
    assert torch.equal(states[-1].masked_fill(~MASKS["ragged"][:, :, None], 0.0), expected)
    encoder.pack(False)
    assert torch.equal(encoder(ids(), MASKS["ragged"]).tokens_BTD, expected)


def test_arithmetic_follows_the_real_tokens() -> None:
    """Of the linear layers; attention's own products are a thirtieth of a BERT of 128 tokens."""
    encoder, mask_BT = encoder_of().eval(), MASKS["ragged"]

    def linear_flops() -> int:
        with FlopCounterMode(display=False) as counter:
            encoder(ids(), mask_BT)
        return sum(flops for operation, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(operation))

    padded = linear_flops()
    encoder.pack()
    assert linear_flops() == padded * int(mask_BT.sum()) // mask_BT.numel()


def test_frozen_layers_are_packed_without_a_graph() -> None:
    encoder = encoder_of().train()
    encoder.pack()
    freeze_layers(encoder, 2)
    _, gradients = run(encoder, MASKS["ragged"])
    assert {name.split(".")[3] for name, gradient in gradients.items() if gradient is not None} == {"2"}


def test_dropout_of_the_attention_is_drawn_and_drawn_again_from_the_same_seed() -> None:
    encoder = encoder_of(attention_probs_dropout_prob=0.5).train()
    encoder.pack()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(encoder(ids(), MASKS["ragged"]).tokens_BTD)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_where_the_tokens_are() -> None:
    packing = Packing.of(MASKS["a text without tokens"])
    assert packing.start_B1.tolist() == [0, 3, 3, 12, 13]
    assert packing.start_B1.dtype == torch.int32
    values_BT = torch.arange(36.0).view(4, 9)
    packed_N = packing.pack(values_BT)
    assert packed_N.tolist() == [0, 1, 2, *range(18, 27), 27]
    assert torch.equal(packing.unpack(packed_N), values_BT.masked_fill(~packing.mask_BT, 0.0))


def test_attention_is_a_softmax_within_each_text() -> None:
    """The formula, text by text."""
    packing = Packing.of(MASKS["ragged"])
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, len(packing.place_N), 8, generator=generator) for _ in range(3))
    attended, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3, packing=packing)
    parts = []
    for first, end in itertools.pairwise(packing.start_B1.tolist()):
        weights = (0.3 * query[0, :, first:end] @ key[0, :, first:end].mT).softmax(dim=-1)
        parts.append((weights @ value[0, :, first:end]).transpose(0, 1))
    torch.testing.assert_close(attended[0], torch.cat(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["clip_text", "static"])
def test_other_backbones_say_so(name: str) -> None:
    clip = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"dimension": 8, "vocab_size": 10} if name == "static" else clip
    encoder = create_text_encoder(name, **sizes)
    with pytest.raises(ConfigError, match="encodes padded texts only: take a BERT"):
        encoder.pack()


def test_a_published_folder_does_not_remember_it(tmp_path: Any) -> None:
    """How a model was trained is no part of it."""
    encoder = encoder_of()
    encoder.pack()
    encoder.backbone.config.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
