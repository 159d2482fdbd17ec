"""A classifier's data: which shards, whose labels and how many of them, and loaders opened for this rank."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.data.shards.format import MANIFEST
from medvl.data.shards.verify import check_against
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.pretraining import DataLoaders, describe

Settle = Callable[[NDArray[np.float64], Sequence[str]], NDArray[np.float64]]
"""Labels of 1, 0, -1 or NaN, one column a name, to 1, 0 or NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelledData:
    """Where labels, boxes or masks come from, and how many of them are used."""

    train: Path
    """Folder of shards that have them."""
    valid: Path
    """Folder of shards of other patients, which decides when to stop."""
    labels: tuple[str, ...] = ()
    """Names to learn; none takes all that the shards have."""
    fraction: float = 1.0
    """Of the training patients whose labels are used; validation always has all of its own."""
    draw: int = 0
    """Seed of that fraction: `medvl eval probe` draws the same patients for the same number."""
    workers: int = 8
    """Processes of each rank that read ahead. They change nothing but the speed."""
    valid_batch: int = 128
    max_skipped: float = 0.001
    """Budget of images that cannot be read: below 1 a share, else a number."""
    seed: int = 0
    """Of the order of the images, and of the augmentation."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be above 0 and at most 1, got {self.fraction:g}")

    def check(self, how: str) -> None:
        """Raises ConfigError when a folder is missing. `how` names the commands that make them."""
        wanted = [("data.train", self.train), ("data.valid", self.valid)]
        missing = [f"{name} {path}" for name, path in wanted if not (path / MANIFEST).is_file()]
        if missing:
            raise ConfigError(f"not there: {', '.join(missing)}\n{how}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelConfig(LabelledData):
    """Where the labels of a classifier come from."""

    image: ConVIRTAugmentation | EvalTransform
    """Of the training images; validation takes the model's own transform."""

    def names(self) -> tuple[str, ...]:
        """The labels to learn. Raises ConfigError when the shards lack one."""
        from medvl.data.shards.format import Manifest

        there = Manifest.read(self.train).label_names
        unknown = [name for name in self.labels if name not in there]
        if unknown or not there:
            raise ConfigError(f"{self.train} has no label {', '.join(unknown) or 'at all'}: it has {', '.join(there)}")
        return self.labels or there


def open_labels(data: LabelConfig, model: Any, settle: Settle, batch: int) -> DataLoaders:
    """Open the loaders of a classifier for this rank; the columns are `model.config.labels`.

    Raises ShardError when a folder is damaged, SplitError when the two share a patient, ConfigError when the batch does
    not fit the ranks or the drawn images.
    """
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.subset import LabelPolicyView, Subset, label_fraction, no_text
    from medvl.data.shards.source import ShardSource
    from medvl.train.parallel.distributed import rank_and_world

    rank, world = rank_and_world()
    common: dict[str, Any] = {
        "tokenizer": no_text,
        "text": WholeText(),
        "seed": data.seed,
        "max_skipped": data.max_skipped,
    }
    shards, held_out = ShardSource(data.train), ShardSource(data.valid)
    check_against(shards.manifest, held_out.manifest)
    patients = [shards.sample(position).patient for position in range(len(shards))]
    drawn = Subset(shards, label_fraction(patients, data.fraction, data.draw))
    names = model.config.labels
    source = LabelPolicyView(drawn, names, settle)
    train = open_loader(
        source, batch=batch, train=True, image=data.image, rank=rank, world=world, workers=data.workers, **common
    )
    described = {
        "data": {
            "train": describe(shards.manifest) | {"fraction": data.fraction, "draw": data.draw, "images": len(drawn)},
            "valid": describe(held_out.manifest),
        },
        "train_manifest": dataclasses.asdict(shards.manifest),
    }
    common |= {"batch": data.valid_batch, "image": model.transform, "train": False}
    few = min(data.workers, 2)
    judged = open_loader(held_out, workers=few if rank == 0 else 0, **common)
    losses = open_loader(LabelPolicyView(held_out, names, settle), rank=rank, world=world, workers=few, **common)
    return DataLoaders(train, losses, judged, described)
