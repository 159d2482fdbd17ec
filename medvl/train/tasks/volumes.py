"""Data settings and loaders for pretraining on volumes and texts."""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from medvl.data.shards.verify import check_against
from medvl.data.transforms.text import RandomSection, RandomSentence, ShuffledSentences, WholeText
from medvl.data.volumes.transform import VolumeTransform
from medvl.train.tasks.pretraining import (
    DataLoaders,
    LoaderConfig,
    check_tokenizer,
    describe,
    open_data,
    open_split,
    open_train,
    open_valid,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeDataConfig(LoaderConfig):
    """Shards of volumes, text and crop for pretraining."""

    own_data: ClassVar[str] = (
        "medvl shards volumes --table rows.csv --image-column path --patient-column patient "
        "--text-column report --out shards/ours"
    )
    extra_train: tuple[Path, ...] = ()
    """Further folders of shards, shuffled together with `train`."""
    tokenizer: Path | None = None
    """Folder of a tokenizer, as written by `medvl vocab`; None uses the text encoder's own from
    the hub.
    """
    volume: VolumeTransform
    """Crop of the training volumes; validation uses the model's own."""
    reconstructions: Literal["all", "one"] = "all"
    """An epoch has all reconstructions of a scan, or one, which is drawn (HLIP)."""
    text: RandomSentence | WholeText | RandomSection | ShuffledSentences
    """Policy that selects the text of a sample."""
    memory_gib: float = 8.0
    """Limit of the memory of volumes that the loader's workers prefetch on a rank, in GiB."""

    def inputs(self) -> Iterator[tuple[str, Path, str]]:
        """Yield (field, folder, file that it must contain) of the folders that the run reads."""
        yield from LoaderConfig.inputs(self)
        for path in self.extra_train:
            yield "extra_train", path, "manifest.json"
        if self.tokenizer is not None:
            yield "tokenizer", self.tokenizer, "tokenizer.json"


@open_data.register
def open_volumes(data: VolumeDataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a pretraining run on volumes for this rank.

    Raises ShardError where a folder is damaged, SplitError where training and validation share a
    patient, ConfigError where the shards hold images, the batch does not fit the ranks or the
    memory, or the model has no tokenizer.
    """
    from medvl.data.loading.sources import ConcatSource
    from medvl.data.loading.studies import ScanSource, one_a_scan
    from medvl.data.shards.source import ShardSource

    check_tokenizer(model)
    train, valid = open_split(data)
    source: Any = train
    if data.extra_train:
        source = ConcatSource([train, *map(ShardSource, data.extra_train)])
        if valid is not None:
            check_against(source.manifest, valid.manifest)
    entries = describe(
        source.manifest,
        None if valid is None else valid.manifest,
        reconstructions=data.reconstructions,
    )
    if data.reconstructions == "one":
        source = ScanSource(source)
    elif getattr(model.config, "positives", "study") not in ("study", "either"):
        scans = len(ScanSource(source))
        if scans < len(source):
            _log.warning(
                "%d volumes of %d scans: reconstructions of a scan are negatives of each other; "
                "set model.positives to study, or data.reconstructions to one",
                *(len(source), scans),
            )
    options: dict[str, Any] = {
        "tokenizer": model.tokenizer,
        "text": data.text,
        "inputs": model.inputs,
        "memory": int(data.memory_gib * 2**30),
    }
    volume = dataclasses.replace(data.volume, organs=model.transform.organs)
    loader = open_train(data, source, micro_batch, image=volume, **options)
    if valid is None:
        return DataLoaders(loader, None, None, entries)
    options["image"] = model.transform
    losses = open_valid(data, one_a_scan(valid), keep_imageless=True, **options)
    volumes = open_valid(data, valid, shared=False, **options)
    return DataLoaders(loader, losses, volumes, entries)
