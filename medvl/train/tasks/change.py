"""Data settings and loaders for classification of change between an image and its prior image."""

import dataclasses
from typing import Any

from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.train.tasks.classification import LabelledDataConfig
from medvl.train.tasks.common import DataLoaders, describe, open_split, open_train, open_valid


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeDataConfig(LabelledDataConfig):
    """Shards with labels of change, such as those of `medvl shards ms-cxr-t`, and the augmentation."""

    image: ConVIRTAugmentation | EvalTransform
    """Transform of the training images and their prior images; validation uses the model's own."""

    def names(self) -> tuple[str, ...]:
        """Return the findings to learn. Raises ConfigError where the shards have no label of change of one."""
        from medvl.data.loading.subset import changes_of
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        found = {name for position in range(len(source)) for name in changes_of(source.sample(position))}
        return self.choose_labels(sorted(found), "label of change")


def open_change(data: ChangeDataConfig, model: Any, batch: int) -> DataLoaders:
    """Open the loaders of a classifier of change for this rank; the findings are `model.config.findings`.

    Batches hold the prior images too, which have no labels of their own unless they have prior images.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient, ConfigError where the batch
    does not fit the ranks or the selected images.
    """
    from medvl.data.loading.subset import ChangeLabels, Subset, label_fraction, no_text

    options: dict[str, Any] = {"tokenizer": no_text, "text": WholeText(), "inputs": model.inputs}
    train, valid = open_split(data)
    assert valid is not None
    patients = [train.sample(position).patient for position in range(len(train))]
    selected = Subset(train, label_fraction(patients, data.fraction, data.fraction_seed))
    findings = model.config.findings
    loader = open_train(data, ChangeLabels(selected, findings), batch, image=data.image, **options)
    options["image"] = model.transform
    losses = open_valid(data, ChangeLabels(valid, findings), **options)
    images = open_valid(data, valid, shared=False, **options)
    selection = {"fraction": data.fraction, "fraction_seed": data.fraction_seed, "images": len(selected)}
    return DataLoaders(loader, losses, images, describe(train.manifest, valid.manifest, **selection))
