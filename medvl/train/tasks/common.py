"""Data settings and loaders shared by all training tasks."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.data.shards.format import MANIFEST, Manifest, nearby_splits
from medvl.data.shards.verify import check_against
from medvl.data.storage.location import locate
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.loading.loader import Loader
    from medvl.data.shards.source import ShardSource

_VALID_WORKERS = 2
"""Maximum workers of a validation loader: it reads little, and its workers stay alive beside those of training."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Folders of shards and settings of their loaders."""

    train: str | Path
    """Folder of shards for training, or its address: s3://, gs://, az://, hf:// or https://."""
    valid: Path | None
    """Folder of shards for validation, of other patients, or its address; None disables validation."""
    workers: int = 8
    """Prefetching processes per rank. They affect the speed only."""
    valid_batch: int = 128
    """Samples of a validation batch; for contrastive losses also the pool of negatives."""
    max_skipped: float = 0.001
    """Budget of unreadable samples over all epochs, each counted once: below 1 a fraction, else a number."""
    seed: int = 0
    """Seed of the order of the samples and of their augmentation."""
    regions: str | None = None
    """Name of the regions that `medvl regions` wrote beside each folder of shards, for a model with `image_encoder`
    `regions:WIDTH`; None reads pixels."""

    def check(self, advice: str) -> None:
        """Raise ConfigError where a folder is missing, StorageError where a store cannot be reached.

        `advice` names the commands that create the folders.
        """
        located = [(name, locate(path), file) for name, path, file in self.inputs()]
        missing = [(name, path, file) for name, path, file in located if not (path / file).is_file()]
        if missing and all(name == "tokenizer" for name, _, _ in missing):
            raise ConfigError(_no_tokenizer(self.train, missing[0][1]), "not_found", field="data.tokenizer")
        if missing:
            listed = ", ".join(f"data.{name} {path}" for name, path, _ in missing)
            splits = "" if missing[0][2] != MANIFEST else nearby_splits(missing[0][1])
            message = f"no shards in {listed}; {splits}" if splits else f"not found: {listed}\n{advice}"
            raise ConfigError(message, "not_found", field=f"data.{missing[0][0]}")

    def inputs(self) -> Iterator[tuple[str, Path, str]]:
        """Yield (field, folder, file that it must contain) of the folders that the run reads."""
        yield "train", Path(self.train), MANIFEST
        if self.valid is not None:
            yield "valid", self.valid, MANIFEST


@dataclasses.dataclass(frozen=True, slots=True)
class DataLoaders:
    """Loaders of a run, opened for this rank."""

    train: Any
    """This rank's training batches."""
    valid: Any | None
    """This rank's share of the validation batches."""
    valid_images: Any | None
    """All validation images, for evaluators that run on one rank."""
    described: dict[str, Any]
    """Entries for checkpoints: `data`, and `train_manifest` with the patients of the training data."""


def _no_tokenizer(train: str | Path, folder: Any) -> str:
    """Return the message for a missing vocabulary beside shards that exist."""
    reason = f"no tokenizer.json in data.tokenizer {folder}"
    return f"{reason}; make the vocabulary of the texts first:\n    medvl vocab {train} {folder}"


def check_tokenizer(model: Any) -> None:
    """Raise ConfigError for a model without a tokenizer."""
    if model.tokenizer is None:
        message = "the model has no tokenizer; set model.text_weights to a folder that has one beside the weights, or"
        message += " data.tokenizer for a text encoder from scratch"
        raise ConfigError(message, "missing", field="data.tokenizer")


def open_split(
    data: LoaderConfig, *, one_folder: bool = False, train_regions: str | None = None
) -> "tuple[ShardSource, ShardSource | None]":
    """Open the shards of training and validation; the second is None without validation.

    Args:
        data: the folders.
        one_folder: allow the same shards for both, for a corpus that splits questions instead of images.
        train_regions: name of regions that the training shards alone have, in place of `data.regions`.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient or the images of validation
    are synthetic, ConfigError where they have regions of different detectors.
    """
    from medvl.data.loading.sources import check_real
    from medvl.data.shards.regions import check_one_detector
    from medvl.data.shards.source import ShardSource

    train = ShardSource(data.train, regions=train_regions or data.regions)
    if data.valid is None:
        return train, None
    valid = ShardSource(data.valid, regions=data.regions)
    if train_regions is None:
        check_one_detector([train.region_manifest, valid.region_manifest])
    if not (one_folder and train.fingerprint == valid.fingerprint):
        check_against(train.manifest, valid.manifest)
    check_real(valid, "data.valid")
    return train, valid


def bind_regions(model: Any, source: Any) -> dict[str, Any]:
    """Record the detector of a source's regions in the model that is trained with them.

    Returns the entry for `describe`, empty without regions. Raises ConfigError as `RegionEncoder.bind` does.
    """
    from medvl.data.loading.sources import region_manifest_of
    from medvl.encoders.regions import RegionEncoder

    manifest = region_manifest_of(source)
    if manifest is None:
        return {}
    encoders = [module for module in model.modules() if isinstance(module, RegionEncoder)]
    if not encoders:
        message = f"{model.name} reads pixels: leave data.regions out, or set image_encoder to regions:{manifest.width}"
        raise ConfigError(message, "conflict", field="data.regions")
    for encoder in encoders:
        encoder.bind(manifest.detector, manifest.detector_sha256, manifest.width, manifest.trained_on)
    return {"regions": manifest.summary()}


def open_train(data: LoaderConfig, source: Any, batch: int, **options: Any) -> "Loader":
    """Open this rank's loader of training batches; `batch` counts the samples over all ranks.

    `options` are those of `open_loader`, or of the function `opener` that takes its place.
    """
    return _open(data, source, batch=batch, train=True, workers=data.workers, **options)


def open_valid(data: LoaderConfig, source: Any, *, shared: bool = True, **options: Any) -> "Loader":
    """Open a validation loader: this rank's share of the batches, or with `shared=False` all of them on each rank."""
    from medvl.common.ranks import rank_and_world

    workers = min(data.workers, _VALID_WORKERS)
    options = {"batch": data.valid_batch, "train": False, **options}
    if shared:
        return _open(data, source, workers=workers, **options)
    workers = workers if rank_and_world()[0] == 0 else 0  # used on rank 0 only
    return _open(data, source, rank=0, world=1, workers=workers, **options)


def _open(data: LoaderConfig, source: Any, opener: "Callable[..., Loader] | None" = None, **options: Any) -> "Loader":
    """Open a loader with `opener`, by default `open_loader`."""
    from medvl.data.loading.loader import open_loader

    return (opener or open_loader)(source, **{"seed": data.seed, "max_skipped": data.max_skipped, **options})


def describe(train: Manifest, valid: Manifest | None, **options: Any) -> dict[str, Any]:
    """Return the entries of `DataLoaders.described`; `options` describe the selection of training samples."""
    data: dict[str, Mapping[str, Any]] = {"train": _summary(train) | options}
    if valid is not None:
        data["valid"] = _summary(valid)
    return {"data": data, "train_manifest": train.to_json()}


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "corpus": manifest.corpus,
        "split": manifest.split,
        "samples": manifest.samples,
        "patients": len(manifest.patients),
        "fingerprint": manifest.fingerprint,
    }
