"""A dense head's data: which shards, whose boxes or masks and how many of them, and loaders opened for this rank."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from medvl.data.shards.verify import check_against
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.train.tasks.classification import LabelledData
from medvl.train.tasks.pretraining import DataLoaders, describe

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import Kind
    from medvl.data.loading.subset import Subset
    from medvl.data.shards.source import ShardSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseDataConfig(LabelledData):
    """Where boxes or masks come from. Images are given to the frozen encoder as its own transform makes them."""

    def names(self, kind: "Kind") -> tuple[str, ...]:
        """The labels to learn. Raises ConfigError when the shards have no box (or mask) of one."""
        from medvl.data.loading.dense_targets import annotated_labels
        from medvl.data.shards.source import ShardSource

        source = ShardSource(self.train)
        there = annotated_labels([source.sample(position) for position in range(len(source))], kind)
        unknown = [name for name in self.labels if name not in there]
        if unknown or not there:
            raise ConfigError(
                f"{self.train} has no {kind} of {', '.join(unknown) or 'anything'}: it has {', '.join(there) or 'none'}"
            )
        return self.labels or there


def open_marks(data: DenseDataConfig, model: Any, kind: "Kind", batch: int) -> DataLoaders:
    """Open the loaders of a dense head for this rank; labels and grid are the model's.

    Raises ShardError when a folder is damaged, SplitError when the two share a patient, ConfigError when the batch does
    not fit the ranks or the drawn images, CorpusError when boxes or masks are not as medvl writes them.
    """
    from medvl.data.loading.dense_targets import DenseTargets, DenseTargetTable
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.subset import no_text
    from medvl.data.shards.source import ShardSource
    from medvl.train.parallel.distributed import rank_and_world

    rank, world = rank_and_world()
    targets = DenseTargets(kind, model.config.labels, model.transform, model.grid)
    common: dict[str, Any] = {
        "image": model.transform,
        "tokenizer": no_text,
        "text": WholeText(),
        "seed": data.seed,
        "max_skipped": data.max_skipped,
    }
    ours: dict[str, Any] = {**common, "rank": rank, "world": world}
    shards, held_out = ShardSource(data.train), ShardSource(data.valid)
    check_against(shards.manifest, held_out.manifest)
    drawn, judged = _looked_at(shards, kind, data.fraction, data.draw), _looked_at(held_out, kind)
    few = min(data.workers, 2)
    train = open_loader(
        drawn, batch=batch, train=True, workers=data.workers, add_targets=DenseTargetTable(targets, drawn), **ours
    )
    losses = open_loader(
        judged, batch=data.valid_batch, train=False, workers=few, add_targets=DenseTargetTable(targets, judged), **ours
    )
    images = open_loader(judged, batch=data.valid_batch, train=False, workers=few if rank == 0 else 0, **common)
    told = {"fraction": data.fraction, "draw": data.draw, "images": len(drawn)}
    described = {
        "data": {"train": describe(shards.manifest) | told, "valid": describe(held_out.manifest)},
        "train_manifest": dataclasses.asdict(shards.manifest),
    }
    return DataLoaders(train, losses, images, described)


def _looked_at(shards: "ShardSource", kind: "Kind", fraction: float = 1.0, draw: int = 0) -> "Subset":
    """The images of a share of the patients in which somebody looked for boxes or masks."""
    from medvl.data.loading.dense_targets import is_annotated
    from medvl.data.loading.subset import Subset, label_fraction

    samples = [shards.sample(position) for position in range(len(shards))]
    taken = label_fraction([sample.patient for sample in samples], fraction, draw)
    marked = np.array([position for position in taken.tolist() if is_annotated(samples[position], kind)], np.int64)
    if not len(marked):
        raise ConfigError(f"{shards.folder}: no image of these patients has {kind}, not even an empty list of them")
    return Subset(shards, marked)
