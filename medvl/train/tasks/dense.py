"""Data settings and loaders for detection and segmentation."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from medvl.data.transforms.text import WholeText
from medvl.data.transforms.turning import LViTAugmentation
from medvl.errors import ConfigError
from medvl.train.tasks.classification import LabelledDataConfig
from medvl.train.tasks.common import DataLoaders, describe, open_split, open_train, open_valid

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import Kind
    from medvl.data.loading.subset import Subset
    from medvl.data.shards.source import ShardSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseDataConfig(LabelledDataConfig):
    """Shards with boxes or masks, their texts and the augmentation."""

    image: LViTAugmentation | None = None
    """Augmentation of the training images, with the size and fit of the model's transform; None: the model's transform,
    which validation always uses."""
    text: WholeText = dataclasses.field(default_factory=WholeText)
    """Text of a sample, for models that read text."""
    unlabelled: bool = False
    """Also train on the images of the other patients if `fraction` is below 1, without their annotations, for models
    that learn from unlabelled images (`LViT`)."""

    def __post_init__(self) -> None:
        LabelledDataConfig.__post_init__(self)
        if self.unlabelled and self.fraction == 1:
            message = "unlabelled images are those outside of the fraction; set a fraction below 1"
            raise ConfigError(message, "conflict", field="unlabelled")

    def names(self, kind: "Kind") -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards have no box (or mask) of one."""
        from medvl.data.loading.dense_targets import annotated_labels
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        return self.choose_labels(annotated_labels([source.sample(i) for i in range(len(source))], kind), kind)

    def unlabelled_images(self, kind: "Kind") -> int:
        """Return the number of training images that `unlabelled` adds."""
        from medvl.data.shards.source import ShardSource

        return len(_annotated(ShardSource(self.train), kind, self)[1]) if self.unlabelled else 0


def open_dense(data: DenseDataConfig, model: Any, kind: "Kind", batch: int) -> DataLoaders:
    """Open the loaders of a detector or segmenter for this rank; labels and grid are the model's.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient, ConfigError where the batch
    does not fit the ranks or the selected images, or the augmentation the model. Samples with malformed boxes or masks
    count as unreadable.
    """
    from medvl.data.loading.dense_targets import DenseTargets
    from medvl.data.loading.subset import no_text

    if data.image is not None and data.image.base() != model.transform:
        message = f"expected an augmentation of the model's {model.transform}, got {data.image}; set its size and fit"
        raise ConfigError(message, "mismatch", field="data.image")
    options: dict[str, Any] = {"tokenizer": model.tokenizer or no_text, "text": data.text}
    train, valid = open_split(data)
    assert valid is not None
    selected, unlabelled = _annotated(train, kind, data)
    held_out, _ = _annotated(valid, kind)
    targets = DenseTargets(kind, model.config.labels, model.transform, model.grid)
    options["image"] = model.transform
    losses = open_valid(data, held_out, targets=targets, **options)
    images = open_valid(data, held_out, shared=False, **options)
    if data.unlabelled:
        targets = dataclasses.replace(targets, unlabelled=unlabelled)
    options |= {"image": data.image or model.transform, "targets": targets}
    loader = open_train(data, selected, batch, **options)
    selection = {"fraction": data.fraction, "fraction_seed": data.fraction_seed, "images": len(selected)}
    if data.unlabelled:
        selection["unlabelled"] = len(unlabelled)
    return DataLoaders(loader, losses, images, describe(train.manifest, valid.manifest, **selection))


def _annotated(
    shards: "ShardSource", kind: "Kind", data: DenseDataConfig | None = None
) -> "tuple[Subset, dict[str, int]]":
    """Return the images that were annotated with boxes or masks, and the numbers of those that are unlabelled, by key.

    These are the images of a fraction of the patients, and with `data.unlabelled` those of the others.
    """
    from medvl.data.loading.dense_targets import is_annotated
    from medvl.data.loading.subset import Subset, label_fraction

    samples = [shards.sample(position) for position in range(len(shards))]
    fraction, seed = (1.0, 0) if data is None else (data.fraction, data.fraction_seed)
    labelled = set(label_fraction([sample.patient for sample in samples], fraction, seed).tolist())
    positions = [position for position, sample in enumerate(samples) if is_annotated(sample, kind)]
    if not labelled & set(positions):
        raise ConfigError(f"{shards.folder}: no image of the selected patients was annotated with {kind}", "empty")
    others = [samples[position].key for position in positions if position not in labelled]
    if data is None or not data.unlabelled:
        positions = [position for position in positions if position in labelled]
    return Subset(shards, np.array(positions, np.int64)), {key: number for number, key in enumerate(others)}
