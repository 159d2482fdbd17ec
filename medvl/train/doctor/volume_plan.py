"""Arithmetic and memory of a volume encoder on paper; hours, terabytes and cost of training on a
corpus of volumes, from rates measured on this machine and from numbers that the user states.
"""

import dataclasses
import gzip
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from medvl.data.volumes.codec import decode_volume, encode_volume
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.options import VolumeOptions
from medvl.data.volumes.reading import prepared
from medvl.data.volumes.transform import VolumeTransform
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
    counts: dict[Any, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) not in shapes:
            counts[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # so that no storage gets the address of another
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        encoder(volume_BCDHW)
    return sum(counts.values())


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


_T = TypeVar("_T")
_NOISE = (22.0, 12.0)
"""Standard deviation of the synthetic CT in the body and around it, in Hounsfield units."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the plan cannot measure. Defaults are those of CT-RATE's training part."""

    volumes: int = 47_149
    """Volumes of the corpus that are converted."""
    scans: int = 24_128
    """Scans, each with one or more of these volumes."""
    raw_tb: float = 21.0
    """Terabytes of the corpus as downloaded."""
    source: tuple[int, int, int] = (256, 512, 512)
    """Voxels along (z, y, x) of a typical file."""
    source_spacing: tuple[float, float, float] = (1.25, 0.68, 0.68)
    """Its spacing in mm."""
    spacing: tuple[float, float, float] = (3.0, 1.0, 1.0)
    """Spacing of the shards in mm."""
    epochs: float | None = None
    """Passes over the data; None: those of the recipe."""
    tflops: float
    """Peak of one device in TFLOP/s, at the precision of the run."""
    utilisation: float = 0.35
    """Share of the peak that a step reaches."""
    devices: int = 8
    """Devices of a machine."""
    cores: int | None = None
    """Cores of a machine; None: those of this one."""
    network_gbit: float = 10.0
    """Rate of the download of one machine in Gbit/s."""
    scaling: float = 0.9
    """Speed of several machines, as a share of so many times one."""
    machines: tuple[int, ...] = (1, 8)
    """Numbers of machines to plan for."""
    price: float | None = None
    """Price of one machine for an hour, in any currency; None: no cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates of one core of this machine, on one synthetic volume."""

    file_mb: float
    read_s: float
    resample_s: float
    encode_s: float
    stored_mb: float
    decode_s: float

    @property
    def convert_s(self) -> float:
        """Seconds of a core for the conversion of a volume."""
        return self.read_s + self.resample_s + self.encode_s


def measure_rates(options: PlanOptions, size: Sequence[int]) -> Measured:
    """Measure reading, resampling, encoding and decoding of a synthetic CT of the size of a file,
    in a temporary folder.

    Args:
        options: size and spacings of the file and the shards.
        size: voxels of the model.
    """
    sides = (int(size[0]), int(size[1]), int(size[2]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.nii.gz"
        _write_synthetic(path, options)
        volume, read_s = _timed(lambda: read_nifti(path))
        file_mb = path.stat().st_size / 1e6
    stored = VolumeOptions(spacing=options.spacing, size=sides)
    ready, resample_s = _timed(lambda: prepared(volume, stored))
    data, encode_s = _timed(lambda: encode_volume(ready.hu_DHW))
    transform = VolumeTransform(size=sides)

    def load() -> Any:
        values = decode_volume(data)
        return transform.fill(values, transform.cut(values.shape))

    decode_s = min(_timed(load)[1] for _ in range(3))
    return Measured(
        file_mb=file_mb,
        read_s=read_s,
        resample_s=resample_s,
        encode_s=encode_s,
        stored_mb=len(data) / 1e6,
        decode_s=decode_s,
    )


def _timed(function: Callable[[], _T]) -> tuple[_T, float]:
    start = time.process_time()  # of this process: other work on the machine does not count
    result = function()
    return result, time.process_time() - start


def _write_synthetic(path: Path, options: PlanOptions) -> None:
    """Write an elliptic body with noise, in air, as a NIfTI file."""
    import nibabel

    height, width = options.source[1:]
    rng = np.random.default_rng(0)
    y_H = (np.arange(height) + 0.5) / height * 2 - 1
    x_W = (np.arange(width) + 0.5) / width * 2 - 1
    radius_HW = np.sqrt((y_H[:, None] / 0.7) ** 2 + x_W**2)
    is_body_HW = radius_HW < 0.9
    is_seen_HW = y_H[:, None] ** 2 + x_W**2 < 1
    hu_DHW = np.empty(options.source, np.int16)
    for slice_HW in hu_DHW:
        noise_HW = rng.standard_normal((height, width), np.float32)
        values_HW = np.where(is_body_HW, 40 + _NOISE[0] * noise_HW, -1000 + _NOISE[1] * noise_HW)
        slice_HW[:] = np.where(is_seen_HW, values_HW, -1024)
    z, y, x = options.source_spacing
    image = nibabel.Nifti1Image(hu_DHW.transpose(2, 1, 0), np.diag([-x, -y, z, 1.0]))
    path.write_bytes(gzip.compress(image.to_bytes(), 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One step of the plan, on a number of machines."""

    name: str
    hours: tuple[float, ...]
    """On each of `PlanOptions.machines`."""


def plan_phases(
    options: PlanOptions, measured: Measured, cost: VolumeCost, samples: float, recomputes: bool
) -> list[Phase]:
    """Return the hours of download, conversion and training, and of the loader beside it.

    Args:
        options: what the user states.
        measured: rates of one core.
        cost: of the encoder.
        samples: volumes that training reads, over all epochs.
        recomputes: whether layers are recomputed in the backward pass.
    """
    cores = options.cores or os.cpu_count() or 1
    passes = 4 if recomputes else 3
    flops = samples * passes * cost.forward_gflop * 1e9
    of_one = {
        "download": options.raw_tb * 8e12 / (options.network_gbit * 1e9),
        "conversion": options.volumes * measured.convert_s / cores,
        "training, devices": flops
        / (options.devices * options.tflops * 1e12 * options.utilisation),
        "training, loader": samples * measured.decode_s / cores,
    }
    speeds = [count * (options.scaling if count > 1 else 1.0) for count in options.machines]
    return [
        Phase(name=name, hours=tuple(seconds / 3600 / speed for speed in speeds))
        for name, seconds in of_one.items()
    ]


def samples_of(settings: Any, options: PlanOptions) -> tuple[float, str]:
    """Return the volumes that training reads, and how they were counted."""
    train = settings.train
    one = settings.data.reconstructions == "one"
    count = options.scans if one else options.volumes
    what = "scans, one reconstruction each" if one else "volumes"
    epochs = options.epochs
    source = "given"
    if epochs is None:
        source = "of the recipe"
        if train.epochs is None:
            samples = float(train.steps * train.global_batch)
            return samples, f"{train.steps:,} steps of {train.global_batch} volumes, {source}"
        epochs = train.epochs
    return epochs * count, f"{epochs:g} epochs ({source}) of {count:,} {what}"


def describe_plan(options: PlanOptions, measured: Measured, cost: VolumeCost, settings: Any) -> str:
    """Return the plan as tables, with every assumption and its origin."""
    samples, how = samples_of(settings, options)
    recomputes = bool(settings.train.checkpoint_activations)
    phases = plan_phases(options, measured, cost, samples, recomputes)
    names = [_machines(count) for count in options.machines]
    hours = {phase.name: phase.hours for phase in phases}
    training = [
        max(pair)
        for pair in zip(hours["training, devices"], hours["training, loader"], strict=True)
    ]
    totals = [
        download + conversion + step
        for download, conversion, step in zip(
            hours["download"], hours["conversion"], training, strict=True
        )
    ]
    rows = [["hours", *names]]
    rows += [[phase.name, *map(_number, phase.hours)] for phase in phases]
    rows.append(["all, one after another", *map(_number, totals)])
    if options.price is not None:
        prices = [
            total * count * options.price
            for total, count in zip(totals, options.machines, strict=True)
        ]
        rows.append(["cost", *map(_number, prices)])
    cores = options.cores or os.cpu_count() or 1
    stored_tb = options.volumes * measured.stored_mb / 1e6
    passes = 4 if recomputes else 3
    loader_rate = cores / measured.decode_s
    rate = (
        options.devices * options.tflops * 1e3 * options.utilisation / (passes * cost.forward_gflop)
    )
    where = f"measured here, on one core and one synthetic volume of {_sides(options.source)}"
    facts = [
        ("raw data", f"{options.raw_tb:g} TB (given)"),
        ("shards", f"{stored_tb:.3g} TB: {measured.stored_mb:.3g} MB a volume ({where}; noise of "
                   f"{_NOISE[0]:g} HU, real noise decides)"),
        ("conversion", f"{measured.convert_s:.3g} s a volume and core: read {measured.read_s:.3g}, "
                       f"resample {measured.resample_s:.3g}, encode {measured.encode_s:.3g} "
                       "(measured likewise)"),
        ("loader", f"{loader_rate:.3g} volumes/s of {cores} cores, {measured.decode_s:.3g} s each "
                   f"(measured likewise); devices take {rate:.3g}"),
        ("samples", how),
        ("step", f"{passes} x {cost.forward_gflop:.4g} GFLOP a volume "
                 f"(counted; {'with' if recomputes else 'without'} recomputation), texts left out"),
        ("devices", f"{options.devices} a machine of {options.tflops:g} TFLOP/s, "
                    f"{options.utilisation:.0%} of it used (given)"),
        ("machines", f"{cores} cores ({'given' if options.cores else 'as this one'}), "
                     f"{options.network_gbit:g} Gbit/s for the download, several reach "
                     f"{options.scaling:.0%} of so many times one (given)"),
        ("spacing", f"{_sides(options.source_spacing)} mm to {_sides(options.spacing)} mm (given)"),
    ]  # fmt: skip
    if options.price is not None:
        facts.append(("price", f"{options.price:g} a machine and hour (given)"))
    commands = (
        "Conversion on several machines: medvl shards ... --engine ray; training: torchrun "
        "--nnodes N."
    )
    table = _table(rows)
    return "\n".join([table, "", *(f"{name:14}{value}" for name, value in facts), "", commands])


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _sides(values: Sequence[float]) -> str:
    return " x ".join(f"{value:g}" for value in values)


def _number(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 4)}f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
