"""A recipe's data: which shards, which image and text of a sample, and loaders opened for this rank."""

import dataclasses
from pathlib import Path
from typing import Any

from medvl.data.shards.format import MANIFEST, Manifest
from medvl.data.shards.verify import check_against
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, RandomCrop
from medvl.data.transforms.text import RandomSection, RandomSentence, WholeText
from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the samples come from and what is made of them."""

    train: str
    """Folder of shards, or the address of one: https://... or s3://..., which is streamed
    (`medvl.data.loading.streaming`)."""
    extra_train: tuple[Path, ...] = ()
    """Further folders of shards, whose samples are shuffled among those of `train`."""
    valid: Path | None
    """Folder of shards for validation, of other patients; None validates nothing."""
    tokenizer: Path | None = None
    """Folder of a tokenizer, as `medvl vocab` makes one; None takes the text encoder's own from the hub."""
    image: ConVIRTAugmentation | EvalTransform | RandomCrop
    """Of the training images; validation takes the model's own transform."""
    text: RandomSentence | WholeText | RandomSection
    workers: int = 8
    """Processes of each rank that read ahead. They change nothing but the speed."""
    valid_batch: int = 128
    """Pairs of a validation batch, which is also the pool of its negatives."""
    max_skipped: float = 0.001
    """Budget of samples that cannot be read: below 1 a share, else a number."""
    seed: int = 0
    """Of the order of the samples, and of what is drawn for each."""

    def check(self, how: str) -> None:
        """Raises ConfigError when a folder is missing. `how` names the commands that make them."""
        wanted = [("data.valid", self.valid, MANIFEST), ("data.tokenizer", self.tokenizer, "tokenizer.json")]
        if "://" not in self.train:
            wanted.insert(0, ("data.train", Path(self.train), MANIFEST))
        wanted += [("data.extra_train", path, MANIFEST) for path in self.extra_train]
        missing = [f"{name} {path}" for name, path, file in wanted if path is not None and not (path / file).is_file()]
        if missing:
            raise ConfigError(f"not there: {', '.join(missing)}\n{how}")


@dataclasses.dataclass(frozen=True, slots=True)
class DataLoaders:
    """What a recipe hands to `train`."""

    train: Any
    """This rank's training batches."""
    valid: Any | None
    """This rank's share of the validation batches."""
    valid_images: Any | None
    """All validation images, for evaluators that run on one rank."""
    described: dict[str, Any]
    """For the checkpoints: `data`, and `train_manifest`, which tells the patients that the model has seen."""


def open_data(data: DataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a recipe for this rank.

    Raises ShardError when a folder is damaged, SplitError when training and validation share a patient, ConfigError
    when the batch does not fit the ranks or the model has no tokenizer.
    """
    from medvl.data.loading.concat import ConcatSource
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.streaming import is_address, open_remote_loader
    from medvl.data.shards.source import ShardSource
    from medvl.train.parallel.distributed import rank_and_world

    if model.tokenizer is None:
        raise ConfigError("the model has no tokenizer: set data.tokenizer to the folder of one")
    rank, world = rank_and_world()
    common: dict[str, Any] = {"tokenizer": model.tokenizer, "seed": data.seed, "max_skipped": data.max_skipped}
    ours: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "workers": data.workers,
        "image": data.image,
        "text": data.text,
        "inputs": model.inputs,
    }
    if is_address(data.train):
        if data.extra_train:
            raise ConfigError(
                "data.extra_train joins folders; a streamed address of data.train cannot be joined with them"
            )
        train_loader: Any = open_remote_loader(data.train, batch=micro_batch, **ours, **common)
        manifest = train_loader.manifest
    else:
        first = ShardSource(data.train)
        source = ConcatSource([first, *map(ShardSource, data.extra_train)]) if data.extra_train else first
        train_loader = open_loader(source, batch=micro_batch, train=True, **ours, **common)
        manifest = source.manifest
    described: dict[str, Any] = {
        "data": {"train": describe(manifest)},
        "train_manifest": dataclasses.asdict(manifest),
    }
    if data.valid is None:
        return DataLoaders(train_loader, None, None, described)
    held_out = ShardSource(data.valid)
    check_against(manifest, held_out.manifest)
    described["data"]["valid"] = describe(held_out.manifest)
    # Validation reads little and seldom: its workers stay alive beside those of training, so they are few.
    common |= {"batch": data.valid_batch, "image": model.transform, "text": data.text, "train": False}
    few = min(data.workers, 2)
    valid_loader = open_loader(held_out, rank=rank, world=world, workers=few, inputs=model.inputs, **common)
    valid_images = open_loader(held_out, workers=few if rank == 0 else 0, **common)
    return DataLoaders(train_loader, valid_loader, valid_images, described)


def describe(manifest: Manifest) -> dict[str, Any]:
    """What a checkpoint tells of a folder of shards."""
    return {
        "corpus": manifest.corpus,
        "split": manifest.split,
        "samples": manifest.samples,
        "patients": len(manifest.patients),
        "fingerprint": manifest.fingerprint,
    }
