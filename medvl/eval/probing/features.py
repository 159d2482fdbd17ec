"""Image features of a source, encoded once and cached on disk.

The cache file is named by the hash of the encoder (weights and settings), the source fingerprint
and the transform. Runs with other fractions or policies reuse it; any change of encoder or data
leads to another file.

Shape letters: N images, D feature dim, L labels.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

import medvl
from medvl.common.files import write_atomic
from medvl.common.ranks import exchange_bytes
from medvl.common.seeding import seeded
from medvl.data.loading.sources import color_for
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, VolumeEncoder, create_image_encoder
from medvl.encoders.pretrained import Pretrained, weights_sha256
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, Source, column, samples_by_key
from medvl.eval.core.metrics import Array
from medvl.models.base import System, evaluating
from medvl.models.downstream.classifier import FROZEN_NOTE, pooled_encoder_of
from medvl.schema import Batch, Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbedEncoder:
    """An encoder of images or volumes with its transform."""

    name: str
    module: ImageEncoder | VolumeEncoder
    transform: Any
    """`EvalTransform` of images, or `VolumeTransform`."""
    note: str = ""
    """What its features do not contain, for results and pages."""

    @classmethod
    def from_model(
        cls, model: System, *, name: str, random: bool = False, seed: int = 0
    ) -> "ProbedEncoder":
        """Return the encoder of a system; `random` reinitialises its weights, as a baseline.

        The encoder of a system that trains layers above a frozen one only (RadZero, UMRL) has a
        `note` that says so.

        Raises ConfigError if the system has no encoder that reads pixels, or trains patches of
        volumes alone.
        """
        if random:
            with seeded(seed):
                model = (
                    type(model)
                    .build(model.config, pretrained=False, tokenizer=model.tokenizer)
                    .to(model.device)
                )
            name = f"{name}, random weights"
        module = pooled_encoder_of(model)
        note = FROZEN_NOTE if module.is_frozen and not random else ""
        return cls(name=name, module=module, transform=model.transform, note=note)

    @classmethod
    def from_name(
        cls, name: str, *, pretrained: Pretrained = False, seed: int = 0, **arguments: Any
    ) -> "ProbedEncoder":
        """Create an encoder by name, from any source of weights. Arguments and errors are
        `create_image_encoder`'s.
        """
        with seeded(seed):
            module = create_image_encoder(name, pretrained=pretrained, **arguments)
        weights = (
            "random"
            if pretrained is False
            else "published"
            if pretrained is True
            else f"{pretrained}'s"
        )
        return cls(
            name=f"{name}, {weights} weights",
            module=module,
            transform=EvalTransform(size=module.image_size[0]),
        )

    @property
    def device(self) -> torch.device:
        """Device of the encoder; raw pixels have no parameters, only their statistics."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return next(tensors).device

    @property
    def sha256(self) -> str:
        """Hash of the weights and settings of the encoder."""
        return weights_sha256(self.module, self.module.config)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTable:
    """Features and labels of a source, in its order."""

    x_ND: torch.Tensor
    """float32 features on the CPU."""
    labels_NL: Array
    """Labels of the table: 1, 0, -1 or NaN."""
    label_names: tuple[str, ...]
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Position of each sample in the source."""
    unreadable: Mapping[str, int]
    fingerprint: str | None
    """Fingerprint of the source."""
    note: str = ""
    """That of the `ProbedEncoder`."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]


def encode_features(
    encoder: ProbedEncoder, loader: Loader, *, cache: Path | None = None
) -> FeatureTable:
    """Return the features of every image of a loader, from the cache if present.

    Args:
        encoder: encoder, on the device of its module.
        loader: loader with `encoder.transform`, opened for evaluation.
        cache: folder of cached features; None for no cache.

    Raises EvaluationError if the loader does not yield every sample once, or a feature is not
    finite.
    """
    source = loader.source
    description = _describe(encoder, source)
    path = (
        None
        if cache is None
        else cache / f"{hashlib.sha256(description.encode()).hexdigest()[:32]}.safetensors"
    )
    encoded = None if path is None else _read(path, description)
    rank, world = getattr(loader, "ranks", (0, 1))
    if world > 1 and b"" in exchange_bytes(b"" if encoded is None else b"cached"):
        encoded = None  # a shared folder may show a file late, and all ranks must take the same way
    if encoded is None:
        encoded = _encode(encoder, loader)
        if path is not None and rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {"x_ND": encoded[0], "position_N": torch.from_numpy(encoded[1])}
            metadata = {"description": description, "unreadable": json.dumps(dict(encoded[2]))}
            write_atomic(path, safetensors.torch.save(tensors, metadata))
    x_ND, position_N, unreadable = encoded
    samples = tuple(source.sample(int(position)) for position in position_N)
    return FeatureTable(
        x_ND=x_ND,
        labels_NL=_labels(samples, source.label_names),
        label_names=tuple(source.label_names),
        samples=samples,
        positions=tuple(position_N.tolist()),
        unreadable=unreadable,
        fingerprint=source.fingerprint,
        note=encoder.note,
    )


_Encoded = tuple[torch.Tensor, np.ndarray, Mapping[str, int]]
"""Features, positions in the source, and counts of unreadable samples."""


def _describe(encoder: ProbedEncoder, source: Source) -> str:
    description: dict[str, Any] = {
        "encoder": encoder.sha256,
        "source": source.fingerprint,
        "transform": [
            "VolumeTransform" if isinstance(encoder.module, VolumeEncoder) else "EvalTransform",
            encoder.transform.settings(),
        ],
        "color": color_for(source, encoder.transform),
        "versions": [medvl.__version__, str(torch.__version__)],
    }
    return json.dumps(description, sort_keys=True)


def _encode(encoder: ProbedEncoder, loader: Loader) -> _Encoded:
    batches = FullPass(loader, synthetic=True)

    def encode(batch: Batch) -> dict[str, torch.Tensor]:
        return {
            "x": encoder.module(
                batch.pixels.to(encoder.device, non_blocking=True)
            ).pooled_BD.float()
        }

    with evaluating(encoder.module):
        x_ND = column(batches.compute(encode), "x")
    if not x_ND.isfinite().all():
        raise EvaluationError(
            f"expected finite features of {encoder.name}; check its weights", "nonfinite"
        )
    by_key = samples_by_key(loader.source)
    return (
        x_ND,
        np.array([by_key[key][0] for key in batches.keys], dtype=np.int64),
        batches.unreadable,
    )


def _read(path: Path, description: str) -> _Encoded | None:
    """Read cached features; None if the file is missing, damaged or of another description."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("description") != description:
                return None
            position_N = file.get_tensor("position_N").numpy()
            return file.get_tensor("x_ND"), position_N, json.loads(metadata["unreadable"])
    except (OSError, safetensors.SafetensorError, ValueError, KeyError):
        return None


def _labels(samples: Sequence[Sample], names: Sequence[str]) -> Array:
    rows = [[sample.labels.get(name, np.nan) for name in names] for sample in samples]
    return np.array(rows, dtype=np.float64).reshape(len(samples), len(names))


# Logistic regression of many labels on fixed features, by L-BFGS.
#
# Shape letters: N images, D feature dim, L labels.

_MAX_STEPS = 1000
TOLERANCE = 1e-4
"""Largest gradient entry at convergence, as in scikit-learn. The loss is a mean over images and
independent of N.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Standardizer:
    """Standardisation to zero mean and unit standard deviation; constant features become 0."""

    mean_D: Tensor
    scale_D: Tensor

    @classmethod
    def fit(cls, x_ND: Tensor) -> "Standardizer":
        """Return the standardisation by mean and standard deviation of these features."""
        x_ND = x_ND.double()
        std_D = x_ND.std(dim=0, unbiased=False)
        varies_D = std_D > 1e-6 * x_ND.abs().mean(dim=0)  # relative: features may be of any scale
        return cls(
            x_ND.mean(dim=0),
            torch.where(varies_D, 1 / std_D.clamp(min=1e-30), torch.zeros_like(std_D)),
        )

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Return standardised features (N, D) in float64."""
        return (x_ND.double() - self.mean_D) * self.scale_D


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProbe:
    """One logistic regression per label."""

    weight_LD: Tensor
    bias_L: Tensor
    converged: bool = True

    def probability_NL(self, x_ND: Tensor) -> Array:
        """Return float64 probabilities of standardised features."""
        return torch.sigmoid(F.linear(x_ND, self.weight_LD, self.bias_L)).numpy()


def fit_logistic(
    x_ND: Tensor,
    y_NL: Array,
    penalty: float,
    start: LinearProbe | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> LinearProbe:
    """Fit probes that minimise, per label, mean cross-entropy + penalty / 2 |weights|^2.

    The bias is not penalised. Labels are independent problems, solved jointly on the images where
    the label is 1 or 0. A label with a single class gets the probability 0.5 everywhere.

    Args:
        x_ND: standardised float64 features.
        y_NL: 1, 0 or NaN (left out).
        penalty: weight of the penalty, above 0, so that the solution is unique.
        start: initial solution, such as that for a larger penalty.
        tolerance: largest gradient entry at convergence.
    """
    known_NL = torch.from_numpy(~np.isnan(y_NL)).double()
    target_NL = torch.from_numpy(np.nan_to_num(y_NL))
    both_L = torch.from_numpy((y_NL == 1).any(axis=0) & (y_NL == 0).any(axis=0)).double()
    weight_NL = both_L * known_NL / known_NL.sum(dim=0).clamp(min=1)
    weight_LD = torch.zeros(y_NL.shape[1], x_ND.shape[1], dtype=torch.float64)
    bias_L = torch.zeros(y_NL.shape[1], dtype=torch.float64)
    if start is not None:
        weight_LD = start.weight_LD.clone()
        bias_L = start.bias_L.clone()
    parameters = [weight_LD.requires_grad_(), bias_L.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=_MAX_STEPS,
        tolerance_grad=tolerance,
        tolerance_change=1e-14,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits_NL = F.linear(x_ND, weight_LD, bias_L)
        loss_NL = F.binary_cross_entropy_with_logits(logits_NL, target_NL, reduction="none")
        loss = (loss_NL * weight_NL).sum() + penalty / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
        closure()
    steepest = max(
        float(parameter.grad.abs().max()) for parameter in parameters if parameter.grad is not None
    )
    return LinearProbe(weight_LD.detach(), bias_L.detach(), steepest <= 2 * tolerance)


def comparable_probabilities(probe: LinearProbe, x_ND: Tensor, y_NL: Array) -> Array:
    """Return probabilities (N, L) for a choice between labels.

    A label that has a single class in training gets the probability of that class, 1 or 0. The 0.5
    of `fit_logistic` would be above those of labels that the probe has learned.

    Args:
        probe: from `fit_logistic`.
        x_ND: standardised features.
        y_NL: labels that the probe was fitted to.
    """
    positive_L = (y_NL == 1).any(axis=0)
    negative_L = (y_NL == 0).any(axis=0)
    return np.where(
        positive_L == negative_L, probe.probability_NL(x_ND), positive_L.astype(np.float64)
    )


def fit_path(x_ND: Tensor, y_NL: Array, penalties: Sequence[float]) -> dict[float, LinearProbe]:
    """Return penalty -> probe, fitted from the largest penalty down, each from the previous
    solution.
    """
    probes: dict[float, LinearProbe] = {}
    probe = None
    for penalty in sorted(penalties, reverse=True):
        probe = probes[penalty] = fit_logistic(x_ND, y_NL, penalty, probe)
    return probes
