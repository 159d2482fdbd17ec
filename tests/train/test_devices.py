"""Steps on a device: sharded on one rank, moved to another device, and repeated bit for bit."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from helpers import train_fakes as fakes
from helpers.contrastive_systems import SYSTEMS, make_batch
from helpers.train_fakes import one_rank, step_of
from torch import Tensor, nn

from medvl.train.loop.step import Step
from medvl.train.optim.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from medvl.train.parallel.distributed import RankInfo, machine_settings
from medvl.train.parallel.model import FSDPModel

STEPS = 4


def run_steps(step: Step, name: str, numbers: range = range(STEPS)) -> list[tuple[float, float]]:
    """Make updates with one batch of a system; return the loss and the gradient norm of each."""
    results = [step(number, 1e-3, [make_batch(name)], 1) for number in numbers]
    assert all(result.updated for result in results)
    return [(float(result.losses[0].total), float(result.grad_norm)) for result in results]


def host_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def only_rank(device: torch.device) -> Iterator[RankInfo]:
    """The only rank of a process group, which sharding needs even where there is nothing to
    share.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield one_rank(device)
    dist.destroy_process_group()


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("bf16", 2e-3)])
@pytest.mark.parametrize("name", ["clip", "convirt"])
def test_sharded_steps_on_one_device_equal_plain_ones(
    name: str, precision: str, near: float, only_rank: RankInfo
) -> None:
    """Attention, or convolutions with batch norms; dropout in both. Weights are compared after a
    large epsilon of Adam, which else turns the rounding of tiny gradients into updates of full
    size.
    """
    optim = fakes.optim(clip_norm=0.5, weight_decay=0.1, eps=1e-4)
    plain, sharded = SYSTEMS[name]().train(), FSDPModel(SYSTEMS[name]().train(), only_rank)
    with machine_settings(only_rank, 1, True, precision):
        ours = run_steps(step_of(sharded, optim, precision, only_rank), name)
        theirs = run_steps(step_of(plain, optim, precision, only_rank), name)
    assert ours == [pytest.approx(pair, rel=near) for pair in theirs]
    assert all(norm > 0.5 for _, norm in theirs)  # so that gradients were clipped
    sharded.gather()
    expected, start = host_weights(plain), SYSTEMS[name]().state_dict()
    for key, tensor in sharded.whole.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=10 * near, atol=near, msg=key)
    assert any(not torch.equal(expected[key], tensor) for key, tensor in start.items())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_optimizer_state_moves_with_the_model(optimizer: str, device: torch.device) -> None:
    """From the CPU to the device and back. Without dropout, whose numbers are drawn by the
    device.
    """
    optim, cpu = fakes.optim(optimizer=optimizer, clip_norm=1.0, eps=1e-4), torch.device("cpu")
    model = SYSTEMS["clip"]().eval()
    whole = run_steps(step_of(copy.deepcopy(model), optim), "clip", range(6))
    parts, state = [], dict[str, Tensor]()
    for number, on in enumerate((cpu, device, cpu)):
        step = step_of(model, optim, ranks=one_rank(on))
        load_optimizer_tensors(step.optimizer, model, state)
        moments = [
            value
            for entry in step.optimizer.state.values()
            for value in entry.values()
            if value.ndim
        ]
        assert {value.device for value in moments} == ({on} if number else set())
        parts += run_steps(step, "clip", range(2 * number, 2 * number + 2))
        state = {
            name: tensor.cpu().clone()
            for name, tensor in optimizer_tensors(step.optimizer, model).items()
        }
    assert parts == [pytest.approx(pair, rel=5e-3) for pair in whole]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "lamb"])
def test_a_restored_state_has_the_strides_of_the_weights(
    optimizer: str, device: torch.device
) -> None:
    """Files hold contiguous tensors, and fused kernels refuse moments that are laid out unlike
    their weights.
    """
    image_BCHW = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)).to(device)
    first = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
        .to(device)
        .to(memory_format=torch.channels_last)
    )
    second = copy.deepcopy(first)
    weight = second[0].weight
    assert not weight.is_contiguous()

    def step(model: nn.Module, built: torch.optim.Optimizer) -> None:
        model(image_BCHW).square().mean().backward()
        built.step()
        built.zero_grad()

    whole, before, after = (
        build_optimizer(model, fakes.optim(optimizer=optimizer))
        for model in (first, second, second)
    )
    step(first, whole)
    step(second, before)
    stored = {
        name: tensor.cpu().contiguous().clone()
        for name, tensor in optimizer_tensors(before, second).items()
    }
    load_optimizer_tensors(after, second, stored)
    moments = [
        value for value in after.state[weight].values() if isinstance(value, Tensor) and value.ndim
    ]
    assert moments
    assert {moment.stride() for moment in moments} == {weight.stride()}
    step(first, whole)
    step(second, after)
    torch.testing.assert_close(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "lamb"])
def test_a_parameter_may_get_its_first_gradient_later(optimizer: str, device: torch.device) -> None:
    """As the parts of UNITER and LXMERT do, which train one task in a step."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).to(device)
    built = build_optimizer(model, fakes.optim(optimizer=optimizer))
    start = copy.deepcopy(model.state_dict())
    for part in (0, 1, 0):
        model[part](torch.ones(3, 2, device=device)).square().mean().backward()
        built.step()
        built.zero_grad()
    assert all(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


@pytest.mark.fault("F17")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["clip", "convirt", "gloria"])
def test_deterministic_steps_are_equal_bit_for_bit(
    name: str, precision: str, device: torch.device
) -> None:
    """Attention, convolutions, dropout, and the sums of words; in TF32 and 16 bits as well."""

    def outcome() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        model, ranks = SYSTEMS[name]().train(), one_rank(device)
        with machine_settings(ranks, 1, True, precision):
            return run_steps(
                step_of(model, fakes.optim(clip_norm=1.0), precision, ranks), name
            ), host_weights(model)

    (losses, weights), (again, weights_again) = outcome(), outcome()
    assert losses == again
    assert len(set(losses)) == STEPS
    for key, tensor in weights.items():
        assert torch.equal(tensor, weights_again[key]), key
