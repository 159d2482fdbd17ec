"""Data settings and loaders for detection and segmentation."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.classification import LabelledDataConfig
from medvl.train.tasks.common import DataLoaders, describe, open_split, open_train, open_valid

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import Kind
    from medvl.data.loading.subset import Subset
    from medvl.data.shards.source import ShardSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseDataConfig(LabelledDataConfig):
    """Shards with boxes or masks. The images are transformed by the frozen encoder's own transform."""

    def names(self, kind: "Kind") -> tuple[str, ...]:
        """Return the labels to learn. Raises ConfigError where the shards have no box (or mask) of one."""
        from medvl.data.loading.dense_targets import annotated_labels
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        return self.choose_labels(annotated_labels([source.sample(i) for i in range(len(source))], kind), kind)


def open_dense(data: DenseDataConfig, model: Any, kind: "Kind", batch: int) -> DataLoaders:
    """Open the loaders of a detector or segmenter for this rank; labels and grid are the model's.

    Raises ShardError where a folder is damaged, SplitError where the two share a patient, ConfigError where the batch
    does not fit the ranks or the selected images, CorpusError where boxes or masks are malformed.
    """
    from medvl.data.loading.dense_targets import DenseTargets, DenseTargetTable
    from medvl.data.loading.subset import no_text

    targets = DenseTargets(kind, model.config.labels, model.transform, model.grid)
    options: dict[str, Any] = {"image": model.transform, "tokenizer": no_text, "text": WholeText()}
    train, valid = open_split(data)
    assert valid is not None
    selected, held_out = _annotated(train, kind, data.fraction, data.fraction_seed), _annotated(valid, kind)
    loader = open_train(data, selected, batch, add_targets=DenseTargetTable(targets, selected), **options)
    losses = open_valid(data, held_out, add_targets=DenseTargetTable(targets, held_out), **options)
    images = open_valid(data, held_out, shared=False, **options)
    selection = {"fraction": data.fraction, "fraction_seed": data.fraction_seed, "images": len(selected)}
    return DataLoaders(loader, losses, images, describe(train.manifest, valid.manifest, **selection))


def _annotated(shards: "ShardSource", kind: "Kind", fraction: float = 1.0, seed: int = 0) -> "Subset":
    """Return the images that were annotated with boxes or masks, of a fraction of the patients."""
    from medvl.data.loading.dense_targets import is_annotated
    from medvl.data.loading.subset import Subset, label_fraction

    samples = [shards.sample(position) for position in range(len(shards))]
    candidates = label_fraction([sample.patient for sample in samples], fraction, seed)
    positions = [position for position in candidates.tolist() if is_annotated(samples[position], kind)]
    if not positions:
        raise ConfigError(f"{shards.folder}: no image of the selected patients was annotated with {kind}", "empty")
    return Subset(shards, np.array(positions, np.int64))
