"""Arithmetic and memory of a volume encoder on paper: no data, no weights and no device."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from medvl.encoders import VolumeEncoder, checkpoint_activations, create_volume_encoder
from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeCost:
    """Cost of one volume in an encoder."""

    size: tuple[int, int, int]
    """Voxels along (z, y, x)."""
    tokens: int
    parameters: int
    forward_gflop: float
    """Operations of a forward pass, multiply and add as two; backward takes twice as many."""
    activations_gb: float
    """What a training step keeps of a volume for its backward pass, in bf16."""
    recomputed_gb: float | None
    """The same with `checkpoint_activations`; None where the encoder has none."""


def volume_cost(arguments: Mapping[str, Any]) -> VolumeCost:
    """Return the cost of `create_volume_encoder(**arguments)`."""
    with torch.device("meta"):
        made = create_volume_encoder(**arguments).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        encoder = made.to_empty(device="cpu")
        volume_BCDHW = torch.empty(1, 1, *encoder.size, dtype=torch.int16)
        with (
            torch.no_grad(),
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):
            encoder(volume_BCDHW)
        plain = _kept_bytes(encoder, volume_BCDHW)
        recomputed = None
        try:
            checkpoint_activations(encoder)
        except ConfigError:  # batch norms
            pass
        else:
            recomputed = _kept_bytes(encoder, volume_BCDHW) / 1e9
    depth, height, width = encoder.grid
    return VolumeCost(
        size=encoder.size,
        tokens=depth * height * width,
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        forward_gflop=counter.get_total_flops() / 1e9,
        activations_gb=plain / 1e9,
        recomputed_gb=recomputed,
    )


def _kept_bytes(encoder: VolumeEncoder, volume_BCDHW: Tensor) -> int:
    """Return the bytes of tensors that a forward pass saves, each storage once, without weights
    and their copies in bf16.
    """
    shapes = {tuple(parameter.shape) for parameter in encoder.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    kept: dict[Any, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) not in shapes:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # so that no storage gets the address of another
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        encoder(volume_BCDHW)
    return sum(kept.values())


def describe_cost(cost: VolumeCost) -> str:
    """Return the cost as a table."""
    depth, height, width = cost.size
    rows = [
        ("volume", f"{depth} x {height} x {width} voxels, {cost.tokens} patches"),
        ("parameters", f"{cost.parameters / 1e6:.1f} million"),
        ("forward pass", f"{cost.forward_gflop:.1f} GFLOP, a training step three times as many"),
        ("activations", f"{cost.activations_gb:.3g} GB a volume in bf16"),
    ]
    if cost.recomputed_gb is not None:
        rows.append(("with recomputation", f"{cost.recomputed_gb:.3g} GB a volume"))
    return "\n".join(f"{name:24}{value}" for name, value in rows)
