"""Image features of a folder of shards, encoded once and kept on disk.

A table of features is a function of the encoder (its weights and settings), the images (the manifest's fingerprint) and
the transform. The hash of the three names its file, so a probe that is run again, with other fractions or policies,
reads what the first run has encoded, and one whose encoder or data differ in anything never does.

Shape letters: N images, D feature dim, L labels.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

import medvl
from medvl.common.files import write_atomic
from medvl.common.seeding import seeded
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, samples_by_key
from medvl.eval.core.interfaces import Loader, Source
from medvl.eval.core.metrics import Array
from medvl.models.base import System
from medvl.models.downstream.classifier import image_encoder_of
from medvl.models.eval_mode import evaluating
from medvl.schema import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbedEncoder:
    """An image encoder of any origin, with how its images are prepared."""

    name: str
    module: ImageEncoder
    transform: EvalTransform

    @classmethod
    def from_model(cls, model: System, *, name: str, random: bool = False, seed: int = 0) -> "ProbedEncoder":
        """The image tower of a system of either family; `random` draws its weights anew, as a baseline.

        Raises ConfigError when the system has no image encoder that reads pixels.
        """
        if random:
            with seeded(seed):
                model = type(model).build(model.config, pretrained=False, tokenizer=model.tokenizer).to(model.device)
            name = f"{name}, random weights"
        module = image_encoder_of(model)
        return cls(name=name, module=module, transform=model.transform)

    @classmethod
    def from_name(
        cls, name: str, *, pretrained: bool = False, image_size: int | None = None, seed: int = 0
    ) -> "ProbedEncoder":
        """An encoder by name, published or at random weights. Raises as `create_image_encoder` does."""
        with seeded(seed):
            module = create_image_encoder(name, pretrained=pretrained, image_size=image_size)
        told = "published weights" if pretrained else "random weights"
        return cls(name=f"{name}, {told}", module=module, transform=EvalTransform(size=module.image_size[0]))

    @property
    def sha256(self) -> str:
        """Hash of the weights and of all that decides what the encoder makes of pixels."""
        digest = hashlib.sha256(json.dumps(self.module.config, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTable:
    """The features of a folder, with its labels as the table has them, in the order of the source."""

    x_ND: torch.Tensor
    """float32, on the CPU."""
    labels_NL: Array
    """1, 0, -1 or NaN."""
    label_names: tuple[str, ...]
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Of each sample in its source."""
    unreadable: Mapping[str, int]
    fingerprint: str | None
    """Of the source."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]


def encode_features(encoder: ProbedEncoder, loader: Loader, *, cache: Path | None = None) -> FeatureTable:
    """Features of every image of a loader, from the cache where they are there.

    Args:
        encoder: what encodes; its module says on which device.
        loader: of `encoder.transform`, opened for evaluation.
        cache: folder of kept features; None keeps none.

    Raises:
        EvaluationError: the loader does not give every sample once, or a feature is not finite.
    """
    source = loader.source
    told = _describe(encoder, source)
    path = None if cache is None else cache / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.safetensors"
    kept = None if path is None else _read(path, told)
    if kept is None:
        kept = _encode(encoder, loader)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {"x_ND": kept[0], "position_N": torch.from_numpy(kept[1])}
            metadata = {"told": told, "unreadable": json.dumps(dict(kept[2]))}
            write_atomic(path, safetensors.torch.save(tensors, metadata))
    x_ND, position_N, unreadable = kept
    samples = tuple(source.sample(int(position)) for position in position_N)
    return FeatureTable(
        x_ND=x_ND,
        labels_NL=_labels(samples, source.label_names),
        label_names=tuple(source.label_names),
        samples=samples,
        positions=tuple(position_N.tolist()),
        unreadable=unreadable,
        fingerprint=source.fingerprint,
    )


_Kept = tuple[torch.Tensor, np.ndarray, Mapping[str, int]]
"""Features, position of each in the source, and what could not be read."""


def _describe(encoder: ProbedEncoder, source: Source) -> str:
    """Everything that the features depend on, as JSON."""
    told: dict[str, Any] = {
        "encoder": encoder.sha256,
        "source": source.fingerprint,
        "transform": [type(encoder.transform).__name__, dataclasses.asdict(encoder.transform)],
        "versions": [medvl.__version__, str(torch.__version__)],
    }
    return json.dumps(told, sort_keys=True)


def _encode(encoder: ProbedEncoder, loader: Loader) -> _Kept:
    given = FullPass(loader)
    device = next(encoder.module.parameters()).device
    parts: list[torch.Tensor] = []
    with evaluating(encoder.module):
        for batch in given:
            features = encoder.module(batch.image_BCHW.to(device, non_blocking=True))
            parts.append(features.pooled_BD.float().cpu())
    x_ND = torch.cat(parts)
    if not x_ND.isfinite().all():
        raise EvaluationError(f"features of {encoder.name} are not finite: look at its weights")
    place_of = samples_by_key(loader.source)
    return x_ND, np.array([place_of[key][0] for key in given.keys], dtype=np.int64), given.unreadable


def _read(path: Path, told: str) -> _Kept | None:
    """What is kept under this name; None where nothing is, or something that was not written for it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("told") != told:
                return None
            position_N = file.get_tensor("position_N").numpy()
            return file.get_tensor("x_ND"), position_N, json.loads(metadata["unreadable"])
    except (OSError, safetensors.SafetensorError, ValueError, KeyError):
        return None


def _labels(samples: Sequence[Sample], names: Sequence[str]) -> Array:
    rows = [[sample.labels.get(name, np.nan) for name in names] for sample in samples]
    return np.array(rows, dtype=np.float64).reshape(len(samples), len(names))
