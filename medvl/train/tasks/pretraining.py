"""Data settings and loaders for pretraining on images and texts."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from medvl.common.untrusted import parse_json
from medvl.data.loading.sources import region_manifest_of
from medvl.data.shards.format import MANIFEST, Manifest, nearby_splits
from medvl.data.shards.verify import check_against
from medvl.data.storage.location import locate
from medvl.data.storage.webdataset_tars import TarFields, is_tar_pattern
from medvl.data.tokenizer.tokenizer import DEFAULT_TOKENS
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, RandomCrop
from medvl.data.transforms.text import (
    GroundedText,
    Paraphrases,
    RandomSection,
    RandomSentence,
    SectionOrStatement,
    ShuffledSentences,
    Statements,
    SwappedSentences,
    TextOrLabels,
    TextPair,
    WholeText,
)
from medvl.encoders.pretrained import weights_sha256
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.loading.loader import Loader
    from medvl.data.shards.source import ShardSource


# Data settings and loaders shared by all training tasks.

_VALID_WORKERS = 2
"""Maximum workers of a validation loader: it reads little, and its workers stay alive beside
those of training.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Folders of shards and settings of their loaders."""

    own_data: ClassVar[str] = (
        "medvl shards table --table rows.csv --image-column path --text-column report "
        "--out shards/ours"
    )
    """Command that makes shards of a user's own data; its help has further options."""
    train: str | Path
    """Folder of shards for training, or its address: s3://, gs://, az://, hf:// or https://."""
    valid: Path | None
    """Folder of shards for validation, of other patients, or its address; None disables
    validation.
    """
    workers: int = 8
    """Prefetching processes per rank. They affect the speed only."""
    valid_batch: int = 128
    """Samples of a validation batch; for contrastive losses also the pool of negatives."""
    max_skipped: float = 0.001
    """Budget of unreadable samples over all epochs, each counted once: below 1 a fraction, else
    a number.
    """
    seed: int = 0
    """Seed of the order of the samples and of their augmentation."""
    regions: str | None = None
    """Name of the regions that `medvl regions` wrote beside each folder of shards, for a model with
    `image_encoder` `regions:WIDTH`; None reads pixels.
    """

    def check(self, advice: str) -> None:
        """Raise ConfigError where a folder is missing, StorageError where a store cannot be
        reached.

        `advice` names the commands that create the folders.
        """
        located = [(name, locate(path), file) for name, path, file in self.inputs()]
        missing = [
            (name, path, file) for name, path, file in located if not (path / file).is_file()
        ]
        if missing and all(name == "tokenizer" for name, _, _ in missing):
            raise ConfigError(
                _no_tokenizer(self.train, missing[0][1]), "not_found", field="data.tokenizer"
            )
        if missing:
            folders = ", ".join(f"data.{name} {path}" for name, path, _ in missing)
            splits = "" if missing[0][2] != MANIFEST else nearby_splits(missing[0][1])
            message = (
                f"no shards in {folders}; {splits}" if splits else f"not found: {folders}\n{advice}"
            )
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
    """Entries for checkpoints: `data`, and `train_manifest` with the patients of the training
    data.
    """


def _no_tokenizer(train: str | Path, folder: Any) -> str:
    """Return the message for a missing vocabulary beside shards that exist."""
    reason = f"no tokenizer.json in data.tokenizer {folder}"
    command = f"medvl vocab --data {train} --out {folder}"
    return f"{reason}; make the vocabulary of the texts first:\n    {command}"


def check_tokenizer(model: Any) -> None:
    """Raise ConfigError for a model without a tokenizer."""
    if model.tokenizer is None:
        message = (
            "the model has no tokenizer; set model.text_weights to a folder that has one "
            "beside the weights, or"
        )
        message += " data.tokenizer for a text encoder from scratch"
        raise ConfigError(message, "missing", field="data.tokenizer")


def open_split(
    data: LoaderConfig, *, one_folder: bool = False, train_regions: str | None = None
) -> "tuple[ShardSource, ShardSource | None]":
    """Open the shards of training and validation; the second is None without validation.

    Args:
        data: the folders.
        one_folder: allow the same shards for both, for a corpus that splits questions instead of
            images.
        train_regions: name of regions that the training shards alone have, in place of
            `data.regions`.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient or the
    images of validation are synthetic, ConfigError where they have regions of different detectors.
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

    Returns the entry for `describe`, empty without regions. Raises ConfigError as
    `RegionEncoder.bind` does.
    """
    from medvl.data.loading.sources import region_manifest_of
    from medvl.encoders.regions import RegionEncoder

    manifest = region_manifest_of(source)
    if manifest is None:
        return {}
    encoders = [module for module in model.modules() if isinstance(module, RegionEncoder)]
    if not encoders:
        message = (
            f"{model.name} reads pixels: leave data.regions out, or set image_encoder to "
            f"regions:{manifest.width}"
        )
        raise ConfigError(message, "conflict", field="data.regions")
    for encoder in encoders:
        encoder.bind(
            manifest.detector, manifest.detector_sha256, manifest.width, manifest.trained_on
        )
    return {"regions": manifest.summary()}


def open_train(data: LoaderConfig, source: Any, batch: int, **options: Any) -> "Loader":
    """Open this rank's loader of training batches; `batch` counts the samples over all ranks.

    `options` are those of `open_loader`, or of the function `opener` that takes its place.
    """
    return _open(data, source, batch=batch, train=True, workers=data.workers, **options)


def open_valid(data: LoaderConfig, source: Any, *, shared: bool = True, **options: Any) -> "Loader":
    """Open a validation loader: this rank's share of the batches, or with `shared=False` all of
    them on each rank.
    """
    from medvl.common.ranks import rank_and_world

    workers = min(data.workers, _VALID_WORKERS)
    options = {"batch": data.valid_batch, "train": False, **options}
    if shared:
        return _open(data, source, workers=workers, **options)
    workers = workers if rank_and_world()[0] == 0 else 0  # used on rank 0 only
    return _open(data, source, rank=0, world=1, workers=workers, **options)


def _open(
    data: LoaderConfig, source: Any, opener: "Callable[..., Loader] | None" = None, **options: Any
) -> "Loader":
    """Open a loader with `opener`, by default `open_loader`."""
    from medvl.data.loading.loader import open_loader

    return (opener or open_loader)(
        source, **{"seed": data.seed, "max_skipped": data.max_skipped, **options}
    )


def describe(train: Manifest, valid: Manifest | None, **options: Any) -> dict[str, Any]:
    """Return the entries of `DataLoaders.described`; `options` describe the selection of
    training samples.
    """
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


# Training on the stored output of a frozen image encoder in place of images
# (`DataConfig.image_features`).

_FIELD = "data.image_features"


def check_can_read_features(data: "DataConfig", model: Any) -> None:
    """Raise ConfigError unless a model and the settings of its data allow stored features in place
    of images.

    The system must train from its image encoder's output alone ("unsupported"), and the encoder
    must be frozen. Dropped patches, regions of a detector, and another transform than the model's
    own, such as an augmentation, exclude them ("conflict").
    """
    if not getattr(model, "reads_features", False):
        message = f"{model.name} does not train from stored features; leave {_FIELD} out"
        raise ConfigError(message, "unsupported", field=_FIELD)
    if any(parameter.requires_grad for parameter in model.image_encoder.parameters()):
        message = (
            "the image encoder is trained, so that its features change: freeze it "
            "(model.frozen_image True, or model.frozen_image_layers -1)"
        )
        raise ConfigError(f"{message}, or leave {_FIELD} out", "conflict", field=_FIELD)
    if getattr(model, "patch_dropout", 0.0):
        message = f"{_FIELD} has all patches: set model.patch_dropout to 0, or leave {_FIELD} out"
        raise ConfigError(message, "conflict", field=_FIELD)
    if data.regions is not None:
        message = f"data.regions and {_FIELD} are both in place of images; leave one out"
        raise ConfigError(message, "conflict", field=_FIELD)
    if not (isinstance(data.image, EvalTransform) and data.image == model.transform):
        message = (
            f"stored features are of images without augmentation: set data.image to "
            f"{_named(model.transform)}"
        )
        raise ConfigError(f"{message}, or leave {_FIELD} out", "conflict", field="data.image")


def check_features(model: Any, source: Any) -> dict[str, Any]:
    """Return the entry for `describe` of the features beside a source, which are those of the
    model's image encoder.

    Raises ConfigError ("mismatch") if they are of another encoder, image size, transform or
    weights, or lack a token.
    """
    from medvl.models.downstream.regions import grid_settings

    manifest = region_manifest_of(source)
    assert manifest is not None, "the source was opened with its regions"
    settings = grid_settings(model.image_encoder, model.transform, all_tokens=True)
    ours = parse_json(json.dumps(settings))
    differences = [name for name in ours if manifest.settings.get(name) != ours[name]]
    if not differences and manifest.detector_sha256 != weights_sha256(
        model.image_encoder, settings
    ):
        differences = ["weights"]
    if differences:
        pairs = [
            f"{name} {manifest.settings.get(name)}, expected {ours[name]}"
            for name in differences
            if name in ours
        ]
        message = (
            f"{manifest.detector} has other {', '.join(differences)} than the model's "
            f"frozen image encoder"
        )
        advice = (
            "run `medvl regions --all-tokens` with the model's encoder, weights, image size and fit"
        )
        raise ConfigError("; ".join([message, *pairs, advice]), "mismatch", field=_FIELD)
    return {"image_features": manifest.summary()}


def _named(transform: EvalTransform) -> str:
    settings = ", ".join(
        f"{name}={value!r}" for name, value in transform.settings().items() if value
    )
    return f"EvalTransform({settings})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(LoaderConfig):
    """Shards, text and augmentation for pretraining."""

    train: str
    """Folder of shards, or its address: s3://, gs://, az://, hf:// or https://. Or webdataset tars
    without a manifest, as a path or address with braces that ends in .tar
    (`medvl.data.loading.webdataset_loader`).
    """
    samples: int | None = None
    """Samples that make an epoch of webdataset tars, usually all of them; not needed for shards."""
    fields: TarFields = dataclasses.field(default_factory=TarFields)
    """Suffixes of image and text in webdataset tars."""
    extra_train: tuple[Path, ...] = ()
    """Further folders of shards, shuffled together with `train`: pairs, images alone or texts
    alone.
    """
    weights: tuple[float, ...] = ()
    """Shares of `train` and of each of `extra_train` in an epoch, of any sum. An epoch has as many
    samples as all of them together; a folder whose share is above its size is drawn more than once.
    Empty: by size.
    """
    paired_fraction: float = 1.0
    """Fraction of the patients of `train` whose images keep their texts
    (`medvl.data.loading.sources`).
    """
    others: Literal["separate", "drop"] = "separate"
    """Samples of the other patients: images alone and texts alone, for systems that learn from
    them; or left out.
    """
    tokenizer: Path | None = None
    """Folder of a tokenizer, as written by `medvl vocab`; None uses the text encoder's own from
    the hub.
    """
    image: ConVIRTAugmentation | EvalTransform | RandomCrop
    """Transform of the training images; validation uses the model's own."""
    image_features: str | None = None
    """Name of the output of the model's frozen image encoder that `medvl regions --all-tokens`
    wrote beside the folders of training shards. Training reads it in place of images and runs only
    what is trained; validation, and the checkpoint in any use, run the image encoder. None reads
    images.
    """
    text: (
        RandomSentence
        | WholeText
        | RandomSection
        | Paraphrases
        | SectionOrStatement
        | SwappedSentences
        | ShuffledSentences
        | TextPair
        | Statements
        | TextOrLabels
        | GroundedText
    )
    """Policy that selects the text of a sample; `TextPair` for systems that read two."""
    questions: bool = False
    """Each question of shards of a VQA corpus is a sample, with the sections "question" and
    "answer", for writers of answers (`medvl.models.CausalLM`).
    """
    letters: bool = False
    """Questions list their options, in every cyclic order, and the answer is a letter, as the score
    `letter` of `medvl eval multiple-choice` reads them; False: the answer is the option's text.
    """

    def __post_init__(self) -> None:
        if self.letters and not self.questions:
            message = "letters are those of options of questions; set questions to True"
            raise ConfigError(message, "conflict", field="letters")
        alone = not (self.extra_train or self.weights) and self.paired_fraction == 1
        if self.questions and (not alone or is_tar_pattern(self.train)):
            message = (
                "questions are of one folder of shards; leave out extra_train, weights and "
                "paired_fraction"
            )
            raise ConfigError(message, "conflict", field="questions")

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


@functools.singledispatch
def open_data(data: LoaderConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a pretraining run for this rank, by the type of its data settings:
    `open_pairs`, `open_text` or `open_volumes`, or a function of another package that is registered
    with `open_data.register`.

    Raises what that function raises, ConfigError if there is none.
    """
    message = f"expected data settings that a function is registered for, got {type(data).__name__}"
    raise ConfigError(f"{message}; use `open_data.register`", "unsupported", field="data")


@open_data.register
def open_pairs(data: DataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a pretraining run on images and texts for this rank.

    Of volumes, which the model reads as slices, an epoch has one of each scan.

    Raises ShardError where a folder is damaged, SplitError where training and validation share a
    patient, ConfigError where the batch does not fit the ranks, the model has no tokenizer, a file
    of statements is of other studies, or stored features are not those of the model's frozen
    encoder.
    """
    from medvl.data.loading.sources import ConcatSource, UnpairedSource
    from medvl.data.loading.studies import AnswerSource, one_a_scan
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
    _check_files(data.text, source)
    if isinstance(data.text, GroundedText):
        _check_grounded(data, model, source)
    is_stored = data.image_features is not None
    selection = check_features(model, source) if is_stored else bind_regions(model, source)
    if data.paired_fraction < 1:
        selection |= {"paired_fraction": data.paired_fraction, "others": data.others}
    if data.weights:
        selection["weights"] = list(data.weights)
    entries = describe(source.manifest, None if valid is None else valid.manifest, **selection)
    inputs = dataclasses.replace(model.inputs, regions=True) if is_stored else model.inputs
    held_out: Any = valid
    if data.questions:
        reading: Any = {"letters": data.letters, "earlier": model.inputs.prior_image}
        source = AnswerSource(train, "train", **reading)
        if valid is not None:
            held_out = AnswerSource(valid, valid.manifest.split, **reading)
    if data.paired_fraction < 1 and one_a_scan(train) is not train:
        raise ConfigError(
            "scans of data.train have several volumes, of which an epoch draws one: leave "
            "paired_fraction out, or convert one reconstruction of each scan",
            "conflict",
            field="data.paired_fraction",
        )
    if data.paired_fraction == 1 and not data.questions:
        source = one_a_scan(source)
    loader = open_train(data, source, micro_batch, image=data.image, inputs=inputs, **options)
    return DataLoaders(loader, *_valid_loaders(data, held_out, model, options), entries)


def _check_files(text: Any, source: Any) -> None:
    """Raise ConfigError where a file of statements has none about a study of the data, so that
    nothing would be trained, or where one of paraphrases cannot be read.
    """
    if isinstance(text, Paraphrases):
        text.check()
    if not isinstance(text, Statements) or text.file is None:
        return
    from medvl.data.reports.statements import read_statements

    statements = read_statements(text.file)
    if not any(statements.get(source.sample(position).study) for position in range(len(source))):
        message = (
            f"{text.file} has no statement about a study of data.train: expected the "
            f"names of the shards' studies"
        )
        advice = "`medvl knowledge statements` makes them from those of MIMIC-CXR"
        raise ConfigError(f"{message}; {advice}", "mismatch", field="data.text.file")


_BOXED = "<obj>Mass.<box><x1><y20><x39><y98></box></obj>"


def _check_grounded(data: DataConfig, model: Any, source: Any) -> None:
    """Raise ConfigError where boxes are not of the images that the model sees, no sample has
    sentences, or the tokenizer does not keep boxes.
    """
    from medvl.data.grounded import grounded_text, read_grounded

    if not isinstance(data.image, EvalTransform) or data.image.fit != "crop":
        message = "boxes are of the centre square: set data.image to an EvalTransform of fit crop"
        raise ConfigError(message, "conflict", field="data.image")
    if model.transform.fit != "crop":
        message = (
            f"boxes are of the centre square: expected the fit crop, got {model.transform.fit}"
        )
        raise ConfigError(message, "conflict", field="model.fit")
    if not any("<box>" in grounded_text(source.sample(place)) for place in range(len(source))):
        message = "no sample of data.train has sentences with boxes; take shards of padchest-gr"
        raise ConfigError(message, "missing", field="data.text")
    ids_1T, _ = model.tokenizer.with_max_tokens(DEFAULT_TOKENS)([_BOXED])
    if read_grounded(model.tokenizer.decode(ids_1T[0])) != read_grounded(_BOXED):
        message = f"the tokenizer changes {_BOXED}; take that of a language model"
        raise ConfigError(message, "unsupported", field="data.tokenizer")


def _open_tars(
    data: DataConfig, model: Any, micro_batch: int, options: dict[str, Any]
) -> DataLoaders:
    """Open loaders where the training data are webdataset tars. Checkpoints then have no record
    of the patients.
    """
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
        message = (
            f"data.{name} needs folders of shards; convert the tars with `medvl shards webdataset`"
        )
        raise ConfigError(message, "conflict", field=f"data.{name}")
    if data.samples is None:
        raise ConfigError(
            "set data.samples to the number of samples in the tars", "missing", field="data.samples"
        )
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
    entry = {
        "corpus": "webdataset",
        "split": "train",
        "samples": data.samples,
        "fingerprint": loader.fingerprint,
    }
    entries: dict[str, Any] = {"data": {"train": entry}}
    if valid is not None:
        entries["data"]["valid"] = describe(valid.manifest, None)["data"]["train"]
    return DataLoaders(loader, *_valid_loaders(data, valid, model, options), entries)


def _valid_loaders(
    data: DataConfig, valid: Any, model: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    if valid is None:
        return None, None
    from medvl.data.loading.studies import one_a_scan

    options = {**options, "image": model.transform}
    needs = model.inputs.for_writing
    scans = valid if data.questions else one_a_scan(valid)
    losses = open_valid(data, scans, inputs=model.inputs, keep_imageless=True, **options)
    return losses, open_valid(data, valid, shared=False, inputs=needs, **options)
