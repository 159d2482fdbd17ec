"""Supervised tasks: classification, change, answers, boxes and masks."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from medvl.common.config_io import check_within
from medvl.common.seeding import seeded
from medvl.data.shards.format import Manifest
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, ImageTransform
from medvl.data.transforms.text import OptionTexts, WholeText
from medvl.data.transforms.turning import LViTAugmentation
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.bases.base import FusionConfig
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.recipe import data_advice
from medvl.train.tasks.pretraining import (
    DataLoaders,
    LoaderConfig,
    bind_regions,
    describe,
    open_split,
    open_train,
    open_valid,
)

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import Kind
    from medvl.data.loading.sources import Subset
    from medvl.data.loading.studies import OptionSource, QuestionSource
    from medvl.data.shards.source import ShardSource
    from medvl.train.loop.state import Evaluator
    from medvl.train.run import Run


# Data settings and loaders for classification, and the label fractions that dense tasks share.

ApplyPolicy = Callable[[NDArray[np.float64], Sequence[str]], NDArray[np.float64]]
"""Function from labels of 1, 0, -1 or NaN, one column per name, to 1, 0 or NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelledDataConfig(LoaderConfig):
    """Shards with labels, boxes or masks, and the fraction of them to use."""

    train: Path
    """Folder of shards with annotations."""
    valid: Path
    """Folder of shards of other patients, for early stopping."""
    labels: tuple[str, ...] = ()
    """Names to learn; an empty tuple takes all names in the shards."""
    fraction: float = 1.0
    """Fraction of the training patients whose labels are used; validation uses all of its own."""
    fraction_seed: int = 0
    """Seed of that fraction; `medvl eval probe` selects the same patients for the same seed."""

    def __post_init__(self) -> None:
        check_within(self, "(0, 1]", "fraction")

    def choose_labels(self, available: Sequence[str], kind: str) -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards lack one, or have none
        of this kind.
        """
        unknown = [name for name in self.labels if name not in available]
        if unknown or not available:
            raise ConfigError(
                f"{self.train} has no {kind} of {', '.join(unknown) or 'any name'}; it has "
                f"{', '.join(available) or 'none'}",
                "unknown_name" if available else "empty",
                field="data.labels",
            )
        return self.labels or tuple(available)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationDataConfig(LabelledDataConfig):
    """Shards, labels and augmentation for a classifier."""

    image: ConVIRTAugmentation | None = None
    """Augmentation of the training images, of the size of the model's transform, with `pad` where
    that pads; None: the model's transform, which validation always uses.
    """
    augment: bool = False
    """Without `image`: ConVIRT's augmentation, of the size and with the borders of the model's
    transform.
    """

    def __post_init__(self) -> None:
        LabelledDataConfig.__post_init__(self)
        if self.augment and self.image is not None:
            raise ConfigError(
                "data.image is an augmentation: leave data.augment out", "conflict", field="augment"
            )

    def names(self) -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards lack one."""
        return self.choose_labels(Manifest.read(self.train).label_names, "label")


def open_classification(
    data: ClassificationDataConfig, model: Any, apply: ApplyPolicy, batch: int
) -> DataLoaders:
    """Open the loaders of a classifier for this rank; the label columns are `model.config.labels`.

    A model with a tokenizer reads whole reports, in training and validation.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient,
    ConfigError where the batch does not fit the ranks or the selected images, or the augmentation
    the model.
    """
    from medvl.data.loading.sources import LabelPolicyView

    names = model.config.labels
    return open_labelled(
        data, model, batch, lambda source: LabelPolicyView(source, names, apply), model.tokenizer
    )


def open_labelled(
    data: ClassificationDataConfig,
    model: Any,
    batch: int,
    with_labels: Callable[[Any], Any],
    tokenizer: Any,
) -> DataLoaders:
    """Open the loaders of a classifier of any labels for this rank; raises as `open_classification`
    does.

    `with_labels` returns a source with the labels to learn. Without a `tokenizer` no text is read.
    """
    from medvl.data.loading.sources import Subset, label_fraction, no_text

    options: dict[str, Any] = {
        "tokenizer": tokenizer or no_text,
        "text": WholeText(),
        "inputs": model.inputs,
    }
    train, valid = open_split(data)
    assert valid is not None
    regions = bind_regions(model, train)
    training_images = _training_images(data, model.transform)
    patients = [train.sample(position).patient for position in range(len(train))]
    subset = Subset(train, label_fraction(patients, data.fraction, data.fraction_seed))
    loader = open_train(data, with_labels(subset), batch, image=training_images, **options)
    selection = {
        "fraction": data.fraction,
        "fraction_seed": data.fraction_seed,
        "images": len(subset),
    }
    entries = describe(train.manifest, valid.manifest, **selection, **regions)
    options["image"] = model.transform
    losses = open_valid(data, with_labels(valid), **options)
    return DataLoaders(loader, losses, open_valid(data, valid, shared=False, **options), entries)


def _training_images(data: ClassificationDataConfig, transform: EvalTransform) -> ImageTransform:
    """Return the transform of the training images. Raises ConfigError for one that does not fit
    the model's.
    """
    augmentation = data.image
    pads = transform.fit == "pad"
    if augmentation is None and not data.augment:
        return transform
    if augmentation is None:
        published = ConVIRTAugmentation(size=transform.size, pad=pads)
        # published for 224 pixels
        low, high = (sigma * transform.size / 224 for sigma in published.blur_sigma)
        return dataclasses.replace(published, blur_sigma=(low, high))
    if (augmentation.size, augmentation.pad) != (transform.size, pads):
        message = (
            f"expected an augmentation of the model's {transform}, got size {augmentation.size} "
            f"and pad "
            f"{augmentation.pad}; set data.image.size {transform.size} and data.image.pad {pads}"
        )
        raise ConfigError(message, "mismatch", field="data.image")
    return augmentation


# Data settings and loaders for classification of change between an image and its prior image.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeDataConfig(ClassificationDataConfig):
    """Shards with labels of change, such as those of `medvl shards ms-cxr-t`, and the
    augmentation of both images.
    """

    def names(self) -> tuple[str, ...]:
        """Return the findings to learn. Raises ConfigError where the shards have no label of
        change of one.
        """
        from medvl.data.loading.sources import changes_of
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        findings = {
            name for position in range(len(source)) for name in changes_of(source.sample(position))
        }
        return self.choose_labels(sorted(findings), "label of change")


def open_change(data: ChangeDataConfig, model: Any, batch: int) -> DataLoaders:
    """Open the loaders of a classifier of change for this rank; the findings are
    `model.config.findings`.

    Batches hold the prior images too, which have no labels of their own unless they have prior
    images.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient,
    ConfigError where the batch does not fit the ranks or the selected images, or the augmentation
    the model.
    """
    from medvl.data.loading.sources import ChangeLabels

    findings = model.config.findings
    return open_labelled(
        data, model, batch, lambda source: ChangeLabels(source, findings), tokenizer=None
    )


# Data settings and loaders for visual question answering.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQADataConfig(LoaderConfig):
    """Shards with questions, and the augmentation of their images."""

    train: Path
    """Folder of shards with questions, of which training uses those of the split `train`."""
    valid_split: str = "validate"
    """Split of the questions of validation; in a corpus that splits questions instead of images,
    one folder has both splits.
    """
    image: ConVIRTAugmentation | EvalTransform
    """Transform of the training images, without flips, because answers name sides; validation uses
    the model's own. An `EvalTransform` gives the size alone: training images have the model's fit
    too.
    """
    together: int = 1
    """Number of questions about one image in succession in training. They share its crop, and the
    image is encoded once: 4 take about half the time of 1.
    """

    def __post_init__(self) -> None:
        if self.image.flip != "off":
            raise ConfigError(
                f"expected image.flip 'off', because answers name sides, got {self.image.flip!r}",
                "conflict",
                field="image.flip",
            )


def open_vqa(
    data: VQADataConfig,
    model: Any,
    answers: Sequence[str],
    normalize: Callable[[str], str],
    batch: int,
) -> DataLoaders:
    """Open the loaders of a VQA run for this rank; `answers` are the columns of the labels.

    Raises ShardError where a folder is damaged, CorpusError where it has no question of the split,
    SplitError where two folders share a patient, ConfigError where the batch does not fit the ranks
    or the model has no tokenizer.
    """
    from medvl.data.loading.studies import QuestionSource

    def questions(source: "ShardSource", split: str) -> QuestionSource:
        earlier = model.config.earlier_image
        return QuestionSource(source, split, answers, normalize, earlier=earlier)

    return _open_questions(data, model, batch, questions, WholeText(sections=("question",)))


def open_choices(data: VQADataConfig, model: Any, batch: int) -> DataLoaders:
    """Open the loaders of a run on multiple-choice questions for this rank; those without options,
    or with several right ones, are left out.

    Raises as `open_vqa`, and ConfigError where options of a question are equal within the model's
    length of texts.
    """
    from medvl.data.loading.studies import OptionSource

    def questions(source: "ShardSource", split: str) -> OptionSource:
        option_source = OptionSource(source, split)
        _check_options(option_source, model)
        return option_source

    return _open_questions(data, model, batch, questions, OptionTexts())


_MOST_EQUAL = 0.05
"""Share of the questions whose options may be equal to the model."""


def _check_options(source: "OptionSource", model: Any) -> None:
    """Raise ConfigError where many questions have options with equal tokens."""
    equal = 0
    for _, question in source.questions:
        ids_OT, _ = model.tokenizer([question.with_option(each) for each in question.options])
        equal += len(ids_OT.unique(dim=0)) < len(question.options)
    if equal > _MOST_EQUAL * len(source):
        message = (
            f"expected options that differ, got {equal} of {len(source)} questions of "
            f"{source.split} with equal ones, in the vocabulary and {model.config.max_tokens} "
            f"tokens of the model"
        )
        advice = "set a larger max_tokens, or start from a model with another vocabulary"
        raise ConfigError(f"{message}; {advice}", "too_small", field="max_tokens")


def _open_questions(
    data: VQADataConfig,
    model: Any,
    batch: int,
    questions: "Callable[[ShardSource, str], QuestionSource]",
    text: WholeText | OptionTexts,
) -> DataLoaders:
    """Open the loaders of the questions of a source and a split."""
    if model.tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer; start from a checkpoint with one, or set data.tokenizer",
            "missing",
            field="tokenizer",
        )
    options: dict[str, Any] = {"tokenizer": model.tokenizer, "text": text, "inputs": model.inputs}
    train, valid = open_split(data, one_folder=True)
    regions = bind_regions(model, train)
    image = model.transform if isinstance(data.image, EvalTransform) else data.image
    loader = open_train(
        data, questions(train, "train"), batch, image=image, together=data.together, **options
    )
    entries = describe(train.manifest, None if valid is None else valid.manifest, **regions)
    if valid is None:
        return DataLoaders(loader, None, None, entries)
    held_out = questions(valid, data.valid_split)
    options["image"] = model.transform
    losses = open_valid(data, held_out, **options)
    return DataLoaders(loader, losses, open_valid(data, held_out, shared=False, **options), entries)


# Data settings and loaders for detection and segmentation.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseDataConfig(LabelledDataConfig):
    """Shards with boxes or masks, their texts and the augmentation."""

    image: LViTAugmentation | None = None
    """Augmentation of the training images, with the size and fit of the model's transform; None:
    the model's transform, which validation always uses.
    """
    text: WholeText = dataclasses.field(default_factory=WholeText)
    """Text of a sample, for models that read text."""
    unlabelled: bool = False
    """Also train on the images of the other patients if `fraction` is below 1, without their
    annotations, for models that learn from unlabelled images (`LViT`).
    """

    def __post_init__(self) -> None:
        LabelledDataConfig.__post_init__(self)
        if self.unlabelled and self.fraction == 1:
            message = "unlabelled images are those outside of the fraction; set a fraction below 1"
            raise ConfigError(message, "conflict", field="unlabelled")

    def names(self, kind: "Kind") -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards have no box (or mask)
        of one.
        """
        from medvl.data.loading.dense_targets import annotated_labels
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        return self.choose_labels(
            annotated_labels([source.sample(i) for i in range(len(source))], kind), kind
        )

    def unlabelled_images(self, kind: "Kind") -> int:
        """Return the number of training images that `unlabelled` adds."""
        from medvl.data.shards.source import ShardSource

        return len(_annotated(ShardSource(self.train), kind, self)[1]) if self.unlabelled else 0


def open_dense(data: DenseDataConfig, model: Any, kind: "Kind", batch: int) -> DataLoaders:
    """Open the loaders of a detector or segmenter for this rank; labels and grid are the model's.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient,
    ConfigError where the batch does not fit the ranks or the selected images, or the augmentation
    the model. Samples with malformed boxes or masks count as unreadable.
    """
    from medvl.data.loading.dense_targets import DenseTargets
    from medvl.data.loading.sources import no_text

    if data.image is not None and data.image.base() != model.transform:
        message = (
            f"expected an augmentation of the model's {model.transform}, got "
            f"{data.image}; set its size and fit"
        )
        raise ConfigError(message, "mismatch", field="data.image")
    options: dict[str, Any] = {"tokenizer": model.tokenizer or no_text, "text": data.text}
    train, valid = open_split(data)
    assert valid is not None
    subset, unlabelled = _annotated(train, kind, data)
    held_out, _ = _annotated(valid, kind)
    targets = DenseTargets(kind, model.config.labels, model.transform, model.grid)
    options["image"] = model.transform
    losses = open_valid(data, held_out, targets=targets, **options)
    images = open_valid(data, held_out, shared=False, **options)
    if data.unlabelled:
        targets = dataclasses.replace(targets, unlabelled=unlabelled)
    options |= {"image": data.image or model.transform, "targets": targets}
    loader = open_train(data, subset, batch, **options)
    selection = {
        "fraction": data.fraction,
        "fraction_seed": data.fraction_seed,
        "images": len(subset),
    }
    if data.unlabelled:
        selection["unlabelled"] = len(unlabelled)
    return DataLoaders(
        loader, losses, images, describe(train.manifest, valid.manifest, **selection)
    )


def _annotated(
    shards: "ShardSource", kind: "Kind", data: DenseDataConfig | None = None
) -> "tuple[Subset, dict[str, int]]":
    """Return the images that were annotated with boxes or masks, and the numbers of those that are
    unlabelled, by key.

    These are the images of a fraction of the patients, and with `data.unlabelled` those of the
    others.
    """
    from medvl.data.loading.dense_targets import is_annotated
    from medvl.data.loading.sources import Subset, label_fraction

    samples = [shards.sample(position) for position in range(len(shards))]
    fraction, seed = (1.0, 0) if data is None else (data.fraction, data.fraction_seed)
    labelled = set(label_fraction([sample.patient for sample in samples], fraction, seed).tolist())
    positions = [position for position, sample in enumerate(samples) if is_annotated(sample, kind)]
    if not labelled & set(positions):
        raise ConfigError(
            f"{shards.folder}: no image of the selected patients was annotated with {kind}", "empty"
        )
    others = [samples[position].key for position in positions if position not in labelled]
    if data is None or not data.unlabelled:
        positions = [position for position in positions if position in labelled]
    return Subset(shards, np.array(positions, np.int64)), {
        key: number for number, key in enumerate(others)
    }


# Settings and preparation of recipes that fine-tune a fusion-encoder for labels.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierRecipe:
    """All settings of a run of `FusedClassifier`."""

    init_from: Path | None = None
    """Checkpoint to start from: of a fusion-encoder, of a head on one, or of a dual-encoder;
    None creates `model`.
    """
    model: FusionConfig
    """Fusion-encoder, where `init_from` has none."""
    pretrained: bool = False
    """Without `init_from`: start from published weights of both encoders."""
    tokenizer: Path | None = None
    """Without `init_from`: folder of a tokenizer; None uses the text encoder's own from the hub."""
    modalities: Literal["image_text", "image", "text"] = "image_text"
    """Input of the classifier. Labels that were extracted from the report can mostly be read from
    its text: compare with "text" and "image".
    """
    head: Literal["mlp", "meter", "linear"] = "mlp"
    target: Literal["multi_label", "single_label"] = "multi_label"
    image_size: int | None = None
    """With `init_from`: side of the images in pixels, to which learned positions are interpolated;
    None is that of the checkpoint.
    """
    max_tokens: int | None = None
    """With `init_from`: maximum length of a text, which may be above that of the pretraining; None
    is that of the checkpoint.
    """
    head_lr_mult: float = 1.0
    """Learning rate of the head, as a multiple of the encoders'."""
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore"
    """Treatment of uncertain labels (-1)."""
    missing: Literal["ignore", "negative"] = "ignore"
    """Treatment of missing labels."""
    data: ClassificationDataConfig
    optim: OptimConfig
    train: TrainConfig


def classifier_run(
    name: str,
    make_data: str,
    policy: "Callable[..., Any]",
    evaluator: "Callable[..., Evaluator]",
    phantom: str = "",
    complete: "Callable[[Any], ClassifierRecipe] | None" = None,
) -> "Callable[[ClassifierRecipe], Run]":
    """Return the `prepare` function of a recipe for labels.

    Args:
        name: as in `pretraining_run`.
        make_data: as in `pretraining_run`.
        policy: `medvl.eval.LabelPolicy`.
        evaluator: `medvl.eval.ClassifyEval`.
        phantom: as in `pretraining_run`.
        complete: called with the settings after the check of the data; returns those of the run.
    """

    def prepare(recipe: ClassifierRecipe) -> "Run":
        """Create the model, the loaders and the evaluator."""
        recipe.data.check(data_advice(name, make_data, phantom, recipe.data.own_data))
        recipe = recipe if complete is None else complete(recipe)
        labels = policy(uncertain=recipe.uncertain, missing=recipe.missing)
        run = fused_classification(name, recipe, labels.apply)
        return run.with_evaluator(lambda images: evaluator(images, policy=labels))

    return prepare


def fused_classification(recipe: str, settings: ClassifierRecipe, apply: ApplyPolicy) -> "Run":
    """Create the run of a `FusedClassifier`; `apply` maps labels to 1, 0 or NaN.

    Raises what `create_model`, `create_fused_classifier` and `open_classification` raise.
    """
    from medvl.models import FusedClassifier, FusionModel, create_fused_classifier, create_model
    from medvl.train.run import Run

    names = ("modalities", "head", "target", "head_lr_mult")
    labels = settings.data.names()
    choices = {name: getattr(settings, name) for name in names}
    with seeded(settings.train.seed):
        if settings.init_from is None:
            fusion = create_model(
                settings.model, pretrained=settings.pretrained, tokenizer=settings.tokenizer
            )
            assert isinstance(fusion, FusionModel)
            model = FusedClassifier.on(fusion, labels, **choices)
        else:
            model = create_fused_classifier(
                settings.init_from,
                labels,
                fusion=settings.model,
                image_size=settings.image_size,
                max_tokens=settings.max_tokens,
                **choices,
            )
    data = open_classification(settings.data, model, apply, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=data)
