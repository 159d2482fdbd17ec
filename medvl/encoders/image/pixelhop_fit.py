"""Fitting of PixelHop++ to images in bounded memory: one pass for each unit, and one for the
tokens.

A pass accumulates covariances in float64, so that the result does not depend on the size of the
batches and memory does not grow with the number of images. Letters as in
`medvl.encoders.image.pixelhop`; C channels of a unit's input.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.files import write_atomic
from medvl.encoders.image.encoder import ImageEncoder
from medvl.encoders.image.factory import create_image_encoder
from medvl.encoders.image.pixelhop import CONFIG, POOL, SaabUnit
from medvl.errors import ConfigError

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelHopSettings:
    """Settings of a fit; see `medvl.encoders.image.pixelhop`."""

    units: int = 3
    window: int = 5
    cutoff: float = 1e-3
    """Energy above which a node is transformed further."""
    discard: float = 1e-4
    """Energy below which a node is dropped."""
    tokens: int = 15
    token_dim: int = 64
    cells: int = 16
    image_size: int = 224
    mean: float = 0.0
    std: float = 1.0
    """Statistics of pixels in 0..1."""

    def __post_init__(self) -> None:
        for field, valid in (
            ("discard", 0 <= self.discard <= self.cutoff < 1),
            ("window", self.window % 2 == 1 and self.window > 1),
            ("units", self.units > 0),
            ("image_size", self.image_size // POOL ** (self.units - 1) > self.window),
            ("token_dim", 0 < self.token_dim <= self.cells**2),
            ("tokens", self.tokens > 0),
        ):
            if not valid:
                message = f"{field} of PixelHop++ does not fit the other settings: {self}"
                raise ConfigError(message, "out_of_range", field=field)


class Covariance:
    """Sums of vectors and of their products for C groups, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: Tensor = torch.zeros(())
        self._products: Tensor = torch.zeros(())
        self.longest: Tensor = torch.zeros(())
        """(C,): largest norm of a vector of each group."""

    def add(self, vectors_CNK: Tensor) -> None:
        """Add N vectors to each group."""
        vectors_CNK = vectors_CNK.double()
        self.count += vectors_CNK.shape[1]
        self._sum = self._sum + vectors_CNK.sum(dim=1)
        self._products = self._products + vectors_CNK.transpose(1, 2) @ vectors_CNK
        self.longest = torch.maximum(self.longest, vectors_CNK.norm(dim=2).amax(dim=1))

    @property
    def mean_CK(self) -> Tensor:
        """Mean vector of each group."""
        return self._sum / self.count

    @property
    def covariance_CKK(self) -> Tensor:
        """Covariance of each group, divided by the count."""
        return self._products / self.count - self.mean_CK[:, :, None] * self.mean_CK[:, None]


class Saab(NamedTuple):
    """All nodes of one channel's transform, by descending energy after the DC node."""

    kernels_KK: Tensor
    """Orthonormal rows; the first is constant."""
    variance_K: Tensor
    bias_K: Tensor
    """Constant added to the responses: the bias that keeps them positive, less the response to
    the mean window.
    """


def saab(mean_K: Tensor, covariance_KK: Tensor, longest: Tensor) -> Saab:
    """Return the Saab transform of windows with these statistics, float64.

    The AC kernels are eigenvectors within the complement of the constant vector, with the largest
    entry positive.
    """
    size = len(mean_K)
    constant_K = torch.full_like(mean_K, size**-0.5)
    basis_KA = torch.linalg.qr(
        torch.cat([constant_K[:, None], torch.eye(size, dtype=mean_K.dtype)], dim=1)
    ).Q[:, 1:]
    variance_A, vectors_AA = torch.linalg.eigh(basis_KA.T @ covariance_KK @ basis_KA)
    kernels_AK = (basis_KA @ vectors_AA).T.flip(0)
    peak_A = kernels_AK.gather(1, kernels_AK.abs().argmax(dim=1, keepdim=True)).sign()
    kernels_KK = torch.cat([constant_K[None], kernels_AK * peak_A])
    variance_K = torch.cat(
        [(constant_K @ covariance_KK @ constant_K)[None], variance_A.flip(0).clamp(min=0)]
    )
    response_K = kernels_KK @ mean_K
    response_K[0] = 0  # the mean of the windows' means stays in the DC response
    return Saab(kernels_KK, variance_K, longest + response_K.abs().max() - response_K)


def fit_pixelhop(
    images: Callable[[], Iterable[Tensor]], settings: PixelHopSettings
) -> ImageEncoder:
    """Fit an encoder to images.

    Args:
        images: called for every pass; yields batches (B, 1 or 3, H, W) of uint8 pixels of the size
            of the settings, the same images each time.
        settings: sizes and thresholds.

    Raises ConfigError ("out_of_range") if fewer nodes than tokens are kept, or no node can be
    transformed further.
    """
    options: dict[str, Any] = {
        "image_size": settings.image_size,
        "mean": settings.mean,
        "std": settings.std,
    }
    units: list[SaabUnit] = []
    intermediate: list[int] = []
    energies_C = torch.ones(1, dtype=torch.float64)
    for number in range(settings.units):
        statistics = Covariance()
        for image_BCHW in images():
            map_BCHW = _below(_normalized(image_BCHW, settings), units, intermediate)
            statistics.add(windows(map_BCHW, settings.window))
        last = number == settings.units - 1
        unit, further, energies_C = _fit_unit(statistics, energies_C, settings, last)
        units.append(unit)
        intermediate.append(further)
        if not further and not last:
            message = (
                f"no node of unit {number + 1} has an energy above {settings.cutoff:g}; "
                f"lower the cutoff"
            )
            raise ConfigError(message, "out_of_range", field="cutoff")
    nodes = [len(unit.energy_N) for unit in units]
    if sum(nodes) < settings.tokens:
        message = f"{sum(nodes)} nodes are kept, fewer than {settings.tokens} tokens; lower discard"
        raise ConfigError(message, "out_of_range", field="tokens")
    sizes = {name: getattr(settings, name) for name in ("tokens", "token_dim", "cells", "window")}
    encoder = create_image_encoder(
        "pixelhop", nodes=nodes, intermediate=intermediate, **sizes, **options
    )
    net: Any = encoder.backbone
    for mine, fitted in zip(net.units, units, strict=True):
        mine.load_state_dict(fitted.state_dict())
    _fit_tokens(net, images, settings)
    return encoder.eval()


def windows(map_BCHW: Tensor, window: int) -> Tensor:
    """(C, B * H * W, K): the window around every pixel, borders reflected."""
    channels = map_BCHW.shape[1]
    padded = F.pad(map_BCHW, (window // 2,) * 4, mode="reflect")
    unfolded_BKL = F.unfold(padded.flatten(0, 1)[:, None], window).unflatten(0, (-1, channels))
    return unfolded_BKL.permute(1, 0, 3, 2).flatten(1, 2)


def _normalized(image_BCHW: Tensor, settings: PixelHopSettings) -> Tensor:
    grey = image_BCHW.float().mean(dim=1, keepdim=True) / 255
    return (grey - settings.mean) / settings.std


def _below(map_BCHW: Tensor, units: Sequence[SaabUnit], intermediate: Sequence[int]) -> Tensor:
    """Return the input of the next unit."""
    for unit, kept in zip(units, intermediate, strict=True):
        map_BCHW = F.max_pool2d(unit(map_BCHW)[:, :kept], POOL)
    return map_BCHW


def _fit_unit(
    statistics: Covariance, energies_C: Tensor, settings: PixelHopSettings, last: bool
) -> tuple[SaabUnit, int, Tensor]:
    """Return the unit, the number of its intermediate nodes, and their energies."""
    rows = list(zip(statistics.mean_CK, statistics.covariance_CKK, statistics.longest, strict=True))
    fitted = [saab(*row) for row in rows]
    shares_CK = torch.stack(
        [one.variance_K / one.variance_K.sum().clamp(min=1e-30) for one in fitted]
    )
    energy_N = (energies_C[:, None] * shares_CK).flatten()
    kept_N = (energy_N >= settings.discard).nonzero().squeeze(1)
    kept_N = kept_N[energy_N[kept_N].argsort(descending=True, stable=True)]
    size = settings.window**2
    unit = SaabUnit(len(kept_N), settings.window)
    unit.parent_N.copy_(kept_N // size)
    kernels_NK = torch.stack([one.kernels_KK for one in fitted]).flatten(0, 1)[kept_N]
    unit.kernel_N1HW.copy_(kernels_NK.view(-1, 1, settings.window, settings.window))
    unit.bias_N.copy_(torch.stack([one.bias_K for one in fitted]).flatten()[kept_N])
    unit.energy_N.copy_(energy_N[kept_N])
    further = 0 if last else int((energy_N[kept_N] > settings.cutoff).sum())
    return unit, further, energy_N[kept_N][:further]


def _fit_tokens(
    net: Any, images: Callable[[], Iterable[Tensor]], settings: PixelHopSettings
) -> None:
    """Choose the nodes of the tokens and fit their PCA, scaled to a mean variance of 1."""
    energy_N = torch.cat([unit.energy_N for unit in net.units])
    net.node_Q.copy_(energy_N.argsort(descending=True, stable=True)[: settings.tokens])
    statistics = Covariance()
    with torch.no_grad():
        for image_BCHW in images():
            features_BNG = net.cell_features(_normalized(image_BCHW, settings))
            statistics.add(features_BNG[:, net.node_Q].transpose(0, 1))
    variance_QG, vectors_QGG = torch.linalg.eigh(statistics.covariance_CKK)
    variance_QD = variance_QG.flip(1)[:, : settings.token_dim].clamp(min=0)
    components_QGD = vectors_QGG.flip(2)[:, :, : settings.token_dim]
    scale_Q = variance_QD.mean(dim=1).clamp(min=1e-12).rsqrt()
    net.mean_QG.copy_(statistics.mean_CK)
    net.components_QGD.copy_(components_QGD * scale_Q[:, None, None])


def save_pixelhop(encoder: ImageEncoder, folder: Path, fitted: Mapping[str, Any]) -> None:
    """Write `model.safetensors` and `config.json`, with `fitted`: settings, images, and the hash
    of the shards.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}
    write_atomic(folder / WEIGHTS, save(tensors))
    content = {"encoder": encoder.config, "fitted": dict(fitted)}
    write_atomic(folder / CONFIG, json.dumps(content, indent=1, sort_keys=True) + "\n")
