"""Data settings and loaders for classification of change between an image and its prior image."""

import dataclasses
from typing import Any

from medvl.train.tasks.classification import ClassificationDataConfig, open_labelled
from medvl.train.tasks.common import DataLoaders


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeDataConfig(ClassificationDataConfig):
    """Shards with labels of change, such as those of `medvl shards ms-cxr-t`, and the augmentation of both images."""

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
    does not fit the ranks or the selected images, or the augmentation the model.
    """
    from medvl.data.loading.subset import ChangeLabels

    findings = model.config.findings
    return open_labelled(data, model, batch, lambda source: ChangeLabels(source, findings), tokenizer=None)
