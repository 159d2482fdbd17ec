"""Data settings and loaders for pretraining on images and texts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from medvl.data.reports.statements import read_statements
from medvl.data.shards.format import MANIFEST
from medvl.data.shards.verify import check_against
from medvl.data.storage.webdataset_tars import TarFields, is_tar_pattern
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, RandomCrop
from medvl.data.transforms.statements import SectionOrStatement, Statements, TextOrLabels
from medvl.data.transforms.text import (
    RandomSection,
    RandomSentence,
    ShuffledSentences,
    SwappedSentences,
    TextPair,
    WholeText,
)
from medvl.errors import ConfigError
from medvl.schema import Inputs
from medvl.train.tasks.common import (
    DataLoaders,
    LoaderConfig,
    bind_regions,
    check_tokenizer,
    describe,
    open_split,
    open_train,
    open_valid,
)
from medvl.train.tasks.stored_features import check_can_read_features, check_features


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(LoaderConfig):
    """Shards, text and augmentation for pretraining."""

    train: str
    """Folder of shards, or its address: s3://, gs://, az://, hf:// or https://. Or webdataset tars without a manifest,
    as a path or address with braces that ends in .tar (`medvl.data.loading.webdataset_loader`)."""
    samples: int | None = None
    """Samples that make an epoch of webdataset tars, usually all of them; not needed for shards."""
    fields: TarFields = dataclasses.field(default_factory=TarFields)
    """Suffixes of image and text in webdataset tars."""
    extra_train: tuple[Path, ...] = ()
    """Further folders of shards, shuffled together with `train`: pairs, images alone or texts alone."""
    weights: tuple[float, ...] = ()
    """Shares of `train` and of each of `extra_train` in an epoch, of any sum. An epoch has as many samples as all of
    them together; a folder whose share is above its size is drawn more than once. Empty: by size."""
    paired_fraction: float = 1.0
    """Fraction of the patients of `train` whose images keep their texts (`medvl.data.loading.unpair`)."""
    others: Literal["separate", "drop"] = "separate"
    """Samples of the other patients: images alone and texts alone, for systems that learn from them; or left out."""
    tokenizer: Path | None = None
    """Folder of a tokenizer, as written by `medvl vocab`; None uses the text encoder's own from the hub."""
    image: ConVIRTAugmentation | EvalTransform | RandomCrop
    """Transform of the training images; validation uses the model's own."""
    image_features: str | None = None
    """Name of the output of the model's frozen image encoder that `medvl regions --all-tokens` wrote beside the folders
    of training shards. Training reads it in place of images and runs only what is trained; validation, and the
    checkpoint in any use, run the image encoder. None reads images."""
    text: (
        RandomSentence
        | WholeText
        | RandomSection
        | SectionOrStatement
        | SwappedSentences
        | ShuffledSentences
        | TextPair
        | Statements
        | TextOrLabels
    )
    """Policy that selects the text of a sample; `TextPair` for systems that read two."""

    def inputs(self) -> Iterator[tuple[str, Path, str]]:
        """Yield (field, folder, file that it must contain) of the folders that the run reads."""
        if not is_tar_pattern(self.train):
            yield "train", Path(self.train), MANIFEST
        for path in self.extra_train:
            yield "extra_train", path, MANIFEST
        if self.valid is not None:
            yield "valid", self.valid, MANIFEST
        if self.tokenizer is not None:
            yield "tokenizer", self.tokenizer, "tokenizer.json"


def open_data(data: DataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a pretraining run for this rank.

    Raises ShardError where a folder is damaged, SplitError where training and validation share a patient, ConfigError
    where the batch does not fit the ranks, the model has no tokenizer, a file of statements is of other studies, or
    stored features are not those of the model's frozen encoder.
    """
    from medvl.data.loading.concat import ConcatSource
    from medvl.data.loading.unpair import UnpairedSource
    from medvl.data.shards.source import ShardSource

    check_tokenizer(model)
    if data.image_features is not None:
        check_can_read_features(data, model)
    options: dict[str, Any] = {"tokenizer": model.tokenizer, "text": data.text}
    if is_tar_pattern(data.train):
        return _open_tars(data, model, micro_batch, options)
    train, valid = open_split(data, train_regions=data.image_features)
    source: Any = train
    if data.paired_fraction < 1:
        source = UnpairedSource(train, data.paired_fraction, data.seed, data.others)
    if data.extra_train or data.weights:
        regions = data.image_features or data.regions
        others = [ShardSource(folder, regions=regions) for folder in data.extra_train]
        source = ConcatSource([source, *others], data.weights or None)
        if valid is not None:
            check_against(source.manifest, valid.manifest)
    _check_statements(data.text, source)
    is_stored = data.image_features is not None
    chosen = check_features(model, source) if is_stored else bind_regions(model, source)
    if data.paired_fraction < 1:
        chosen |= {"paired_fraction": data.paired_fraction, "others": data.others}
    if data.weights:
        chosen["weights"] = list(data.weights)
    described = describe(source.manifest, None if valid is None else valid.manifest, **chosen)
    inputs = dataclasses.replace(model.inputs, regions=True) if is_stored else model.inputs
    loader = open_train(data, source, micro_batch, image=data.image, inputs=inputs, **options)
    return DataLoaders(loader, *_valid_loaders(data, valid, model, options), described)


def _check_statements(text: Any, source: Any) -> None:
    """Raise ConfigError where a file of statements has none about a study of the data: nothing would be trained."""
    if not isinstance(text, Statements) or text.file is None:
        return
    known = read_statements(text.file)
    if not any(known.get(source.sample(position).study) for position in range(len(source))):
        message = f"{text.file} has no statement about a study of data.train: expected the names of the shards' studies"
        advice = "`medvl knowledge statements` makes them from those of MIMIC-CXR"
        raise ConfigError(f"{message}; {advice}", "mismatch", field="data.text.file")


def _open_tars(data: DataConfig, model: Any, micro_batch: int, options: dict[str, Any]) -> DataLoaders:
    """Open loaders where the training data are webdataset tars. Checkpoints then have no record of the patients."""
    from medvl.data.loading.webdataset_loader import open_webdataset_loader
    from medvl.data.shards.source import ShardSource

    unsupported = {
        "extra_train": data.extra_train,
        "weights": data.weights,
        "paired_fraction": data.paired_fraction < 1,
        "regions": data.regions,
        "image_features": data.image_features,
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        message = f"data.{name} needs folders of shards; convert the tars with `medvl shards webdataset`"
        raise ConfigError(message, "conflict", field=f"data.{name}")
    if data.samples is None:
        raise ConfigError("set data.samples to the number of samples in the tars", "missing", field="data.samples")
    loader = open_webdataset_loader(
        [data.train],
        samples=data.samples,
        batch=micro_batch,
        fields=data.fields,
        image=data.image,
        inputs=model.inputs,
        workers=data.workers,
        seed=data.seed,
        max_skipped=data.max_skipped,
        **options,
    )
    valid = None if data.valid is None else ShardSource(data.valid)
    entry = {"corpus": "webdataset", "split": "train", "samples": data.samples, "fingerprint": loader.fingerprint}
    described: dict[str, Any] = {"data": {"train": entry}}
    if valid is not None:
        described["data"]["valid"] = describe(valid.manifest, None)["data"]["train"]
    return DataLoaders(loader, *_valid_loaders(data, valid, model, options), described)


def _valid_loaders(data: DataConfig, valid: Any, model: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    if valid is None:
        return None, None
    options = {**options, "image": model.transform}
    needed = Inputs(regions=model.inputs.regions, other_view=model.inputs.other_view)
    losses = open_valid(data, valid, inputs=model.inputs, keep_imageless=True, **options)
    return losses, open_valid(data, valid, shared=False, inputs=needed, **options)
