"""Packed texts: values and gradients of padded texts, with less arithmetic."""

import itertools
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.tiny_towers import TINY_BERT
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from medvl.encoders import create_text_encoder, freeze_layers
from medvl.encoders.text import packing as packing_module
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
    return create_text_encoder(
        name, **{**TINY_BERT, **no_dropout, **FAMILIES.get(name, {}), **options}
    )


def ids() -> Tensor:
    return torch.randint(5, 100, (4, 9), generator=torch.Generator().manual_seed(0))


def run(
    encoder: Any, mask_BT: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Tensor | None]]:
    """Return features, and the gradients of a sum with a random weight for every value; on the
    encoder's device.
    """
    encoder.zero_grad()
    device = next(encoder.parameters()).device
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        features = encoder(ids().to(device), mask_BT.to(device))
    weight_BTD = torch.randn(
        features.tokens_BTD.shape, generator=torch.Generator().manual_seed(2)
    ).to(device)
    (
        (features.tokens_BTD * weight_BTD).sum() + (features.pooled_BD * weight_BTD[:, 0]).sum()
    ).backward()
    return features, {name: parameter.grad for name, parameter in encoder.named_parameters()}


@pytest.mark.fault("N6")
@pytest.mark.parametrize("mask_BT", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_values_and_gradients_equal_padded_ones(name: str, mask_BT: Tensor) -> None:
    encoder = encoder_of(name, layers=(0, -2, -1), pool="max").train()
    padded, expected = run(encoder, mask_BT)
    encoder.pack()
    packed, gradients = run(encoder, mask_BT)
    torch.testing.assert_close(packed.tokens_BTD, padded.tokens_BTD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.pooled_BD, padded.pooled_BD, rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.mask_BT, padded.mask_BT)
    assert not packed.tokens_BTD[~mask_BT].any()
    for parameter, gradient in gradients.items():
        padded_gradient = expected[parameter]
        assert (gradient is None) == (padded_gradient is None), parameter
        if gradient is not None:
            torch.testing.assert_close(
                gradient, padded_gradient, rtol=1e-3, atol=1e-4, msg=parameter
            )


@pytest.mark.fault("N6")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_BT", MASKS.values(), ids=MASKS)
def test_packed_texts_in_16_bits_are_as_near_to_float32_as_padded_ones(
    mask_BT: Tensor, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU attention is the kernel for texts of unequal length. Distances are relative, over
    all values at once.
    """
    calls, attend = [], packing_module._attend_varlen
    monkeypatch.setattr(
        packing_module, "_attend_varlen", lambda *inputs: calls.append(1) or attend(*inputs)
    )
    encoder = encoder_of(layers=(0, -2, -1)).train().to(device)

    def outcome(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        features, gradients = run(encoder, mask_BT, dtype)
        values = torch.cat([features.tokens_BTD.flatten(), features.pooled_BD.flatten()]).float()
        return values, torch.cat(
            [each.flatten() for each in gradients.values() if each is not None]
        )

    exact, padded = outcome(torch.float32), outcome(dtype)
    assert not calls
    encoder.pack()
    packed = outcome(dtype)
    for theirs, ours, expected in zip(padded, packed, exact, strict=True):
        assert ours.isfinite().all()
        limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype] * expected.norm()
        assert (theirs - expected).norm() <= limit
        assert (ours - expected).norm() <= limit
    has_kernel = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    assert len(calls) == (TINY_BERT["num_hidden_layers"] if has_kernel and mask_BT.any() else 0)


@pytest.mark.fault("N6")
def test_packed_texts_are_independent() -> None:
    encoder = encoder_of().eval()
    encoder.pack()
    mask_BT = MASKS["ragged"]
    before = encoder(ids(), mask_BT).tokens_BTD
    changed = ids()
    changed[2] = 7
    after = encoder(changed, mask_BT).tokens_BTD
    assert not torch.equal(after[2], before[2])
    torch.testing.assert_close(after[[0, 1, 3]], before[[0, 1, 3]], rtol=0, atol=1e-6)


def test_disabling_packing_restores_padded_encoding() -> None:
    encoder = encoder_of().eval()
    expected = encoder(ids(), MASKS["ragged"]).tokens_BTD
    encoder.pack()
    hidden_BTD = encoder.embed(ids(), MASKS["ragged"])  # the path of fusion models is always padded
    states = encoder.encode(hidden_BTD, MASKS["ragged"])
    assert torch.equal(states[-1].masked_fill(~MASKS["ragged"][:, :, None], 0.0), expected)
    encoder.pack(False)
    assert torch.equal(encoder(ids(), MASKS["ragged"]).tokens_BTD, expected)


def test_flops_are_proportional_to_real_tokens() -> None:
    """Count linear layers only; attention products are a thirtieth of a BERT with 128 tokens."""
    encoder, mask_BT = encoder_of().eval(), MASKS["ragged"].repeat(9, 1)
    ids_BT = ids().repeat(9, 1)

    def linear_flops() -> int:
        with FlopCounterMode(display=False) as counter:
            encoder(ids_BT, mask_BT)
        return sum(
            flops
            for operation, flops in counter.get_flop_counts()["Global"].items()
            if "mm" in str(operation)
        )

    padded = linear_flops()
    encoder.pack()
    rows = 192  # 189 real tokens, filled up
    assert linear_flops() == padded * rows // mask_BT.numel()


def test_rows_of_packed_texts_have_few_lengths() -> None:
    """Kernels are compiled, or CUDA graphs recorded, for every length."""
    generator = torch.Generator().manual_seed(0)
    for longest in (20, 40, 90):
        lengths_B = torch.randint(longest + 1, (16, 1), generator=generator)
        packing = Packing.from_mask(torch.arange(90) < lengths_B)
        tokens = int(lengths_B.sum())
        assert len(packing.index_R) % 64 == 0
        assert tokens <= len(packing.index_R) < tokens + 64
        offsets_O = packing.offsets_O
        assert offsets_O[16] == tokens
        assert offsets_O[-1] == len(packing.index_R)  # the filling's texts come last
        assert 0 <= offsets_O.diff().min() <= offsets_O.diff().max() <= 90
    assert len(Packing.from_mask(MASKS["ragged"]).index_R) == 21  # few texts have few lengths
    nearly_full = torch.arange(72).view(8, 9) < 65
    packing = Packing.from_mask(nearly_full)
    assert len(packing.index_R) == 72  # never more than without packing
    values_BT = torch.arange(72.0).view(8, 9)
    assert torch.equal(packing.unpack(packing.pack(values_BT)), values_BT * nearly_full)


def test_frozen_layers_get_no_gradient_when_packed() -> None:
    encoder = encoder_of().train()
    encoder.pack()
    freeze_layers(encoder, 2)
    _, gradients = run(encoder, MASKS["ragged"])
    assert {name.split(".")[3] for name, gradient in gradients.items() if gradient is not None} == {
        "2"
    }


def test_attention_dropout_is_reproducible_from_the_seed() -> None:
    encoder = encoder_of(attention_probs_dropout_prob=0.5).train()
    encoder.pack()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(encoder(ids(), MASKS["ragged"]).tokens_BTD)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_packing_offsets_and_round_trip() -> None:
    packing = Packing.from_mask(MASKS["a text without tokens"])
    assert packing.offsets_O.tolist() == [0, 3, 3, 12, 13]
    assert packing.offsets_O.dtype == torch.int32
    values_BT = torch.arange(36.0).view(4, 9)
    packed_R = packing.pack(values_BT)
    assert packed_R.tolist() == [0, 1, 2, *range(18, 27), 27]
    assert torch.equal(packing.unpack(packed_R), values_BT.masked_fill(~packing.mask_BT, 0.0))


def test_packed_attention_equals_softmax_per_text() -> None:
    packing = Packing.from_mask(MASKS["ragged"])
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, 2, len(packing.index_R), 8, generator=generator) for _ in range(3)
    )
    attended, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, packing=packing
    )
    parts = []
    for first, end in itertools.pairwise(packing.offsets_O.tolist()):
        weights = (0.3 * query[0, :, first:end] @ key[0, :, first:end].mT).softmax(dim=-1)
        parts.append((weights @ value[0, :, first:end]).transpose(0, 1))
    torch.testing.assert_close(attended[0], torch.cat(parts), rtol=1e-5, atol=1e-6)


def test_filling_attends_to_itself_in_the_kernel_for_unequal_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel leaves rows outside of all texts uninitialised, which would reach gradients."""

    def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Tensor:
        parts = []
        for first, end in itertools.pairwise(packing.offsets_O.tolist()):
            scores_hQK = scale * torch.einsum("qhd,khd->hqk", query[first:end], key[first:end])
            parts.append(torch.einsum("hqk,khd->qhd", scores_hQK.softmax(dim=2), value[first:end]))
        return torch.cat(parts)

    monkeypatch.setattr(packing_module, "_has_varlen", lambda *inputs: True)
    monkeypatch.setattr(packing_module, "_attend_varlen", attend)
    encoder, mask_BT = encoder_of().train(), MASKS["ragged"].repeat(9, 1)
    outcomes = []
    for packed in (False, True):
        encoder.zero_grad()
        encoder.pack(packed)
        pooled_BD = encoder(ids().repeat(9, 1), mask_BT).pooled_BD
        pooled_BD.square().sum().backward()
        gradients = [each.grad for each in encoder.parameters() if each.grad is not None]
        outcomes.append((pooled_BD, *gradients))
    for packed, padded in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["clip_text", "static"])
def test_unsupported_backbone_raises(name: str) -> None:
    clip = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"dimension": 8, "vocab_size": 10} if name == "static" else clip
    encoder = create_text_encoder(name, **sizes)
    with raises(ConfigError, "unsupported"):
        encoder.pack()


def test_packing_is_not_saved_with_the_configuration(tmp_path: Any) -> None:
    encoder = encoder_of()
    encoder.pack()
    encoder.backbone.config.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
