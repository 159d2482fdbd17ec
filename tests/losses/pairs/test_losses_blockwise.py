"""Losses in blocks against their plain form, and shared positives against plain loops."""

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from helpers.loss_checks import compare
from helpers.train_fakes import one_rank
from torch import Tensor

from medvl import losses
from medvl.losses import common as fused
from medvl.losses.common import product_dtype
from medvl.losses.pairs import blockwise
from medvl.losses.pairs.blockwise import info_nce, pairwise_sigmoid, same_pairs, text_ids
from medvl.train.parallel.distributed import machine_settings

STUDIES = torch.tensor([3, 1, 3, 2, 5, 3, 4, 1, 9])
TEXTS = torch.tensor([0, 1, 2, 3, 4, 5, 1, 6, 7])
GROUPS: dict[str, tuple[Tensor, ...]] = {
    "own": (),
    "study": (STUDIES,),
    "study and text": (STUDIES, TEXTS),
}
BATCH = len(STUDIES)


def units(rows: int = BATCH, seed: int = 0, dim: int = 12) -> Tensor:
    return F.normalize(
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


def positives(groups: Sequence[Tensor]) -> list[list[int]]:
    """Return the positives of every row, itself included."""
    return [
        [k for k in range(BATCH) if k == i or any(group_B[i] == group_B[k] for group_B in groups)]
        for i in range(BATCH)
    ]


def naive_info_nce(
    image_BE: Tensor, text_BE: Tensor, weight: float, groups: Sequence[Tensor]
) -> Tensor:
    """Return the mean -log softmax of each row's positives, for rows and columns."""
    total = image_BE.new_zeros(())
    for i, own in enumerate(positives(groups)):
        to_texts = torch.stack([image_BE[i] @ text_E for text_E in text_BE]).log_softmax(0)
        to_images = torch.stack([image_E @ text_BE[i] for image_E in image_BE]).log_softmax(0)
        for k in own:
            total = total - (weight * to_texts[k] + (1 - weight) * to_images[k]) / len(own)
    return total / BATCH


def naive_sigmoid(
    image_BE: Tensor, text_BE: Tensor, bias: Tensor, groups: Sequence[Tensor]
) -> Tensor:
    total = image_BE.new_zeros(())
    for i, own in enumerate(positives(groups)):
        for k in range(BATCH):
            sign = 1.0 if k in own else -1.0
            total = total + torch.log(1 + torch.exp(-sign * (image_BE[i] @ text_BE[k] + bias)))
    return total / BATCH


@pytest.mark.fault("N1")
@pytest.mark.parametrize("rows", [1, 4, 8, BATCH])
@pytest.mark.parametrize("weight", [0.75, 0.0, 1.0])
@pytest.mark.parametrize("name", GROUPS)
def test_info_nce_equals_the_formula(name: str, weight: float, rows: int) -> None:
    """In one block (the plain form), and in several blocks with a smaller last one."""
    groups = GROUPS[name]
    compare(
        lambda scale, image, text: info_nce(scale * image, text, weight, groups, block_rows=rows),
        lambda scale, image, text: naive_info_nce(scale * image, text, weight, groups),
        [torch.tensor(7.0), units(), units(seed=1)],
    )


@pytest.mark.parametrize("rows", [1, 4, 8, BATCH])
@pytest.mark.parametrize("name", GROUPS)
def test_pairwise_sigmoid_equals_the_formula(name: str, rows: int) -> None:
    groups = GROUPS[name]
    compare(
        lambda scale, image, text, bias: pairwise_sigmoid(
            scale * image, text, bias, groups, block_rows=rows
        ),
        lambda scale, image, text, bias: naive_sigmoid(scale * image, text, bias, groups),
        [torch.tensor(7.0), units(), units(seed=1), torch.tensor(-2.0)],
    )


LOSSES: dict[str, Callable[..., Tensor]] = {
    "convirt": lambda image, text, **groups: losses.convirt(image, text, 0.1, 0.75, **groups),
    "clip": lambda image, text, **groups: losses.clip(image, text, torch.tensor(14.0), **groups),
    "siglip": lambda image, text, **groups: losses.siglip(
        image, text, 10.0, torch.tensor(-10.0), **groups
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_large_matrix_is_computed_in_blocks(
    name: str, loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def actual() -> list[Tensor]:
        leaves = [2 * units().requires_grad_(), units(seed=1).requires_grad_()]
        value = loss(*leaves, groups=GROUPS[name])
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    calls: list[int] = []
    plain, blocks = actual(), blockwise._blocks
    monkeypatch.setattr(blockwise, "_CPU_BLOCK_BYTES", 4 * BATCH * 2)
    monkeypatch.setattr(
        blockwise, "_blocks", lambda batch, rows: calls.append(rows) or blocks(batch, rows)
    )
    for ours, expected in zip(actual(), plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=5e-6)
    assert set(calls) == {2}


@pytest.mark.parametrize("scale", [1.0, 100.0, 3000.0])
@pytest.mark.parametrize("aligned", [True, False])
def test_blocks_stay_exact_at_any_temperature(scale: float, aligned: bool) -> None:
    """exp(3000) overflows float32; aligned pairs have a loss and gradient near 0."""
    image_BE = units(33)
    inputs = [image_BE, image_BE.clone() if aligned else units(33, 1)]

    def in_double(image: Tensor, text: Tensor) -> Tensor:
        logits_BB, target_B = scale * image @ text.T, torch.arange(33)
        return (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2

    ours, reference = (
        [x.clone().requires_grad_() for x in inputs],
        [x.double().requires_grad_() for x in inputs],
    )
    value, expected = info_nce(scale * ours[0], ours[1], 0.5, block_rows=10), in_double(*reference)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6 * scale)
    for leaf, other in zip(ours, reference, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(
            leaf.grad.double(), other.grad, rtol=1e-4 * max(1, scale / 100), atol=1e-6 * scale
        )


@pytest.mark.parametrize("learned", ["image", "text", "bias"])
def test_either_side_may_be_frozen(learned: str) -> None:
    def gradient(rows: int) -> Tensor:
        inputs = {"image": units(), "text": units(seed=1), "bias": torch.tensor(-1.0)}
        leaf = inputs[learned].requires_grad_()
        loss = pairwise_sigmoid(inputs["image"], inputs["text"], inputs["bias"], block_rows=rows)
        if learned != "bias":
            loss = loss + info_nce(inputs["image"], inputs["text"], 0.5, block_rows=rows)
        return torch.autograd.grad(loss, leaf)[0]

    torch.testing.assert_close(gradient(4), gradient(BATCH))


def test_blocks_without_gradients_compute_none() -> None:
    assert not info_nce(units(), units(seed=1), 0.5, block_rows=4).requires_grad
    with torch.no_grad():
        value = pairwise_sigmoid(units().requires_grad_(), units(seed=1), -1.0, block_rows=4)
    assert not value.requires_grad
    torch.testing.assert_close(value, pairwise_sigmoid(units(), units(seed=1), -1.0))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_blocks_are_computed_in_float32_under_autocast(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass as well, should that run under it."""
    monkeypatch.setattr(blockwise, "_CPU_BLOCK_BYTES", 4 * BATCH * 2)
    image_BE, text_BE = units().requires_grad_(), units(seed=1)
    plain = loss(image_BE, text_BE)
    (expected,) = torch.autograd.grad(plain, image_BE)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(image_BE, text_BE)
        (gradient,) = torch.autograd.grad(value, image_BE)
    assert torch.equal(value, plain)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    assert loss(image_BE.bfloat16(), text_BE.bfloat16()).dtype == torch.float32


def test_non_finite_inputs_give_a_non_finite_loss() -> None:
    image_BE = units()
    image_BE[5, 0] = torch.nan
    for rows in (4, BATCH):
        assert info_nce(image_BE, units(seed=1), 0.5, block_rows=rows).isnan()
        assert pairwise_sigmoid(image_BE, units(seed=1), -1.0, block_rows=rows).isnan()


def test_blocks_keep_nothing_as_large_as_the_matrix() -> None:
    """The backward pass needs the embeddings and a few numbers per row."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        info_nce(units(200).requires_grad_(), units(200, 1), 0.5, block_rows=8)
    assert max(kept) == 200 * 12


def test_a_second_derivative_in_blocks_is_rejected() -> None:
    """The plain form has one; the blocks would compute a wrong one."""
    for loss in (
        lambda x: info_nce(x, units(), 0.5, block_rows=4),
        lambda x: pairwise_sigmoid(x, x, 0.0, block_rows=4),
    ):
        image_BE = units(seed=1).requires_grad_()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss(image_BE), image_BE, create_graph=True)


def test_shared_positives_lower_the_minimum_loss() -> None:
    """Two images with one text: as negatives of each other, their rows have a loss of at least
    ln 2.
    """
    image_BE = torch.eye(3)[[0, 0, 1]]
    assert losses.clip(image_BE, image_BE, 100.0).item() == pytest.approx(
        2 / 3 * math.log(2), rel=1e-5
    )
    one, other = torch.tensor([1, 1, 2]), torch.tensor([4, 5, 6])
    shared = losses.clip(image_BE, image_BE, 100.0, groups=[one])
    # The least that a target of two halves allows is its entropy, and there the gradient ends.
    assert shared.item() == pytest.approx(2 / 3 * math.log(2), rel=1e-5)
    leaf = image_BE.clone().requires_grad_()
    (with_groups,) = torch.autograd.grad(losses.clip(leaf, image_BE, 100.0, groups=[one]), leaf)
    assert with_groups.abs().max() < 1e-5
    (without,) = torch.autograd.grad(losses.clip(leaf, torch.eye(3)[[0, 2, 1]], 100.0), leaf)
    assert without.abs().max() > 1
    assert torch.equal(
        losses.clip(image_BE, image_BE, 9.0, groups=[other]), losses.clip(image_BE, image_BE, 9.0)
    )


def test_groups_of_another_length_are_rejected() -> None:
    for loss in LOSSES.values():
        with pytest.raises(
            ValueError,
            match=r"groups must be \(9,\) each, as many as pairs: got \[\(9,\), \(8,\)\]",
        ):
            loss(units(), units(), groups=[STUDIES, STUDIES[:8]])


def test_same_pairs_of_rows_and_text_ids_across_batches() -> None:
    assert torch.equal(
        same_pairs(STUDIES, TEXTS, rows=slice(2, 5)), same_pairs(STUDIES, TEXTS)[2:5]
    )
    ids_BT = torch.randint(0, 1000, (4, 30), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.arange(30) < torch.tensor([30, 7, 1, 20])[:, None]
    whole_B = text_ids(ids_BT, mask_BT)
    assert torch.equal(
        text_ids(ids_BT[1:2, :9], mask_BT[1:2, :9]), whole_B[1:2]
    )  # alone, and padded to another width
    swapped_BT = ids_BT.clone()
    swapped_BT[:, [0, 1]] = swapped_BT[:, [1, 0]]
    assert not (text_ids(swapped_BT, mask_BT) == whole_B).any()
    assert (
        text_ids(torch.tensor([[0], [5]]), torch.tensor([[True], [False]])).tolist()[0] != 0
    )  # no text, not padding


@pytest.mark.fault("N4")
@pytest.mark.parametrize(("dtype", "apart"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("noise", [0.02, 1.0])
@pytest.mark.parametrize("name", ["own", "study"])
def test_16_bit_products_round_operands_only(
    name: str, noise: float, dtype: torch.dtype, apart: float
) -> None:
    """With little noise every pair is well aligned: slopes that are rounded before their targets
    are taken off would have gradients off by a third.
    """
    image_BE, other_BE, groups = units(64, 0, 32), units(64, 1, 32), ()
    text_BE = F.normalize(image_BE + noise * other_BE, dim=-1)
    if name == "study":
        groups = (torch.arange(64) // 2,)

    def gradients(loss: Callable[..., Tensor], dtype: torch.dtype, *more: float) -> list[Tensor]:
        sides = [(10 * image_BE).requires_grad_(), text_BE.clone().requires_grad_()]
        value = loss(*sides, *more, groups, block_rows=24, products=dtype)
        return [value.detach(), *torch.autograd.grad(value, sides)]

    for loss, more in ((info_nce, 0.75), (pairwise_sigmoid, -5.0)):
        actual, expected = gradients(loss, dtype, more), gradients(loss, torch.float32, more)
        for mine, exact in zip(actual, expected, strict=True):
            assert mine.dtype == torch.float32
            assert (mine - exact).norm() < apart * exact.norm()
            assert not torch.equal(mine, exact)


@pytest.mark.fault("N3")
@pytest.mark.parametrize("name", GROUPS)
def test_passes_over_a_block_can_be_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the eager backend keeps the test short."""
    torch.compiler.reset()
    compiled = functools.cache(
        functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    )

    def outcome() -> tuple[Tensor, ...]:
        sides = [(10 * units()).requires_grad_(), units(seed=1).requires_grad_()]
        value = info_nce(*sides, 0.75, GROUPS[name], block_rows=4)
        return value, *torch.autograd.grad(value, sides)

    plain = outcome()
    monkeypatch.setattr(blockwise, "fused_if_possible", lambda function, tensor: compiled(function))
    for mine, expected in zip(outcome(), plain, strict=True):
        torch.testing.assert_close(mine, expected)


FORMATS: dict[str, tuple[Literal["fp32", "bf16"], torch.dtype, float]] = {
    "fp32": ("fp32", torch.float32, 2e-5),
    "tf32": ("bf16", torch.float32, 2e-3),
    "bf16": ("bf16", torch.bfloat16, 1.5e-2),
    "fp16": ("bf16", torch.float16, 2e-3),
}
"""Precision of a run, dtype of the products, and the tolerated relative difference of values and
gradients.
"""


@pytest.mark.fault("N3")
@pytest.mark.parametrize(("precision", "products", "apart"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("in_groups", [False, True])
def test_blocks_equal_the_plain_form_in_double_precision(
    in_groups: bool,
    precision: Literal["fp32", "bf16"],
    products: torch.dtype,
    apart: float,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the passes over a block are compiled, and runs in 16 bits multiply float32 in
    TF32.
    """
    compiled, original = set(), fused._compile
    monkeypatch.setattr(
        fused, "_compile", lambda function: compiled.add(function.__name__) or original(function)
    )
    image_BE, groups = (
        20 * units(700, 0, 64),
        (torch.arange(700) // 2, torch.arange(700) % 600) if in_groups else (),
    )
    text_BE = F.normalize(image_BE / 20 + 1.5 * units(700, 1, 64), dim=1)

    def outcome(
        loss: Callable[..., Tensor], parameter: float, sides: list[Tensor], rows: int
    ) -> list[Tensor]:
        leaves = [side.detach().requires_grad_() for side in sides]
        positives = tuple(group_B.to(sides[0].device) for group_B in groups)
        value = loss(*leaves, parameter, positives, block_rows=rows, products=products)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    for loss, parameter in ((info_nce, 0.75), (pairwise_sigmoid, -8.0)):
        expected = outcome(loss, parameter, [image_BE.double(), text_BE.double()], 700)
        with machine_settings(one_rank(device), 1, False, precision):
            found = outcome(loss, parameter, [image_BE.to(device), text_BE.to(device)], 256)
        for mine, exact in zip(found, expected, strict=True):
            assert mine.dtype == torch.float32
            assert (mine.cpu() - exact).norm() < apart * exact.norm()
    is_fused = device.type == "cuda" and fused.can_fuse()
    assert compiled == ({"_gather", "_softmaxes"} if is_fused else set())


def test_a_compiled_step_does_not_search_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search reads the file system, which breaks the graph: here as on a GPU."""
    monkeypatch.setattr(fused, "can_fuse", lambda: torch._dynamo.graph_break() is None)
    on_gpu = SimpleNamespace(is_cuda=True)

    def step(x: Tensor) -> Tensor:
        return fused.fused_if_possible(torch.sin, on_gpu)(x)

    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="eager")(x), x.sin())


def test_the_products_of_a_loss_are_float32_on_a_cpu() -> None:
    """With or without autocast; the GPU's autocast applies to tensors on the GPU only."""
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(units()) is torch.float32
    assert product_dtype(units()) is torch.float32
