"""Data settings and loaders for classification, and the label fractions that dense tasks share."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.common.checks import check_within
from medvl.data.shards.format import Manifest
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, ImageTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.common import (
    DataLoaders,
    LoaderConfig,
    bind_regions,
    describe,
    open_split,
    open_train,
    open_valid,
)

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
        """Return the labels to learn. Raises ConfigError where the shards lack one, or have none of this kind."""
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
    """Augmentation of the training images, of the size of the model's transform, with `pad` where that pads; None: the
    model's transform, which validation always uses."""
    augment: bool = False
    """Without `image`: ConVIRT's augmentation, of the size and with the borders of the model's transform."""

    def __post_init__(self) -> None:
        LabelledDataConfig.__post_init__(self)
        if self.augment and self.image is not None:
            raise ConfigError("data.image is an augmentation: leave data.augment out", "conflict", field="augment")

    def names(self) -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards lack one."""
        return self.choose_labels(Manifest.read(self.train).label_names, "label")


def open_classification(data: ClassificationDataConfig, model: Any, apply: ApplyPolicy, batch: int) -> DataLoaders:
    """Open the loaders of a classifier for this rank; the label columns are `model.config.labels`.

    A model with a tokenizer reads whole reports, in training and validation.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient, ConfigError where the batch
    does not fit the ranks or the selected images, or the augmentation the model.
    """
    from medvl.data.loading.subset import LabelPolicyView

    names = model.config.labels
    return open_labelled(data, model, batch, lambda source: LabelPolicyView(source, names, apply), model.tokenizer)


def open_labelled(
    data: ClassificationDataConfig, model: Any, batch: int, with_labels: Callable[[Any], Any], tokenizer: Any
) -> DataLoaders:
    """Open the loaders of a classifier of any labels for this rank; raises as `open_classification` does.

    `with_labels` returns a source with the labels to learn. Without a `tokenizer` no text is read.
    """
    from medvl.data.loading.subset import Subset, label_fraction, no_text

    options: dict[str, Any] = {"tokenizer": tokenizer or no_text, "text": WholeText(), "inputs": model.inputs}
    train, valid = open_split(data)
    assert valid is not None
    regions = bind_regions(model, train)
    training_images = _training_images(data, model.transform)
    patients = [train.sample(position).patient for position in range(len(train))]
    selected = Subset(train, label_fraction(patients, data.fraction, data.fraction_seed))
    loader = open_train(data, with_labels(selected), batch, image=training_images, **options)
    selection = {"fraction": data.fraction, "fraction_seed": data.fraction_seed, "images": len(selected)}
    described = describe(train.manifest, valid.manifest, **selection, **regions)
    options["image"] = model.transform
    losses = open_valid(data, with_labels(valid), **options)
    return DataLoaders(loader, losses, open_valid(data, valid, shared=False, **options), described)


def _training_images(data: ClassificationDataConfig, transform: EvalTransform) -> ImageTransform:
    """Return the transform of the training images. Raises ConfigError for one that does not fit the model's."""
    augmentation, pads = data.image, transform.fit == "pad"
    if augmentation is None and not data.augment:
        return transform
    if augmentation is None:
        published = ConVIRTAugmentation(size=transform.size, pad=pads)
        low, high = (sigma * transform.size / 224 for sigma in published.blur_sigma)  # published for 224 pixels
        return dataclasses.replace(published, blur_sigma=(low, high))
    if (augmentation.size, augmentation.pad) != (transform.size, pads):
        message = (
            f"expected an augmentation of the model's {transform}, got size {augmentation.size} and pad "
            f"{augmentation.pad}; set data.image.size {transform.size} and data.image.pad {pads}"
        )
        raise ConfigError(message, "mismatch", field="data.image")
    return augmentation
