"""Training data of a model's weights: its modules record the manifests of the shards that they were trained on.

Systems, their encoders and the parts of image generators have an attribute `trained_on`. Whatever copies weights from
one model to another copies it too, so that evaluations refuse the patients of every earlier training.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from medvl.encoders.regions import RegionEncoder

Manifests = Iterable[Mapping[str, Any]]
"""Manifests of shards, as JSON objects."""


def recording_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that record their training data, by name; the name of `model` itself is ""."""
    return {name: module for name, module in model.named_modules() if "trained_on" in vars(module)}


def manifests_of(model: nn.Module) -> list[Mapping[str, Any]]:
    """Return the manifests that a model's modules record, each once; a loaded checkpoint's own comes first."""
    recorded = [each for module in recording_modules(model).values() for each in module.trained_on]
    return [each for number, each in enumerate(recorded) if each not in recorded[:number]]


def generator_manifests(manifests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the manifests of the training data of the generators of synthetic images, theirs included."""
    found = [each for manifest in manifests for one in manifest.get("generators", ()) for each in one["trained_on"]]
    return [*found, *generator_manifests(found)] if found else []


def record_training(model: nn.Module, manifests: Manifests, detector: str | None) -> None:
    """Record in all modules of a model the training data of the weights that they were loaded with.

    Args:
        model: a system, or a part of one.
        manifests: the training data.
        detector: hash of the detector whose regions the weights were trained with; None: unknown, or pixels.
    """
    for module in recording_modules(model).values():
        module.trained_on = tuple(manifests)
        if isinstance(module, RegionEncoder):
            module.detector = detector


def copy_training(source: nn.Module, target: nn.Module) -> None:
    """Record in a model the training data, and the detector, of another one whose weights it got.

    Each module takes what the module of the same name records; modules that the source lacks stay as they are.
    """
    theirs = recording_modules(source)
    for name, module in recording_modules(target).items():
        if name in theirs:
            module.trained_on = theirs[name].trained_on
            if isinstance(module, RegionEncoder):
                module.detector = theirs[name].detector


def add_training(source: nn.Module, target: nn.Module) -> None:
    """Add the training data of a model to that of one of the same structure, whose weights it was mixed into."""
    theirs = recording_modules(source)
    for name, module in recording_modules(target).items():
        more = [each for each in theirs[name].trained_on if each not in module.trained_on]
        module.trained_on = (*module.trained_on, *more)
