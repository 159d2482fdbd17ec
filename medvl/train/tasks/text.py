"""Recipes that pretrain a text encoder on text alone: settings, loaders and preparation."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from medvl.data.shards.format import MANIFEST
from medvl.data.shards.verify import check_against
from medvl.models.language.base import MaskedWordScore
from medvl.train.recipe import Recipe, pretraining_run
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

if TYPE_CHECKING:
    from medvl.train.loop.state import Evaluator
    from medvl.train.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextDataConfig(LoaderConfig):
    """Shards with texts, and the tokenizer."""

    own_data: ClassVar[str] = "medvl shards text --sources notes.jsonl --out shards/ours"
    tokenizer: Path | None = None
    """Folder of a tokenizer, as written by `medvl vocab`; None uses the text encoder's own from
    the hub.
    """
    sections: tuple[str, ...] = ()
    """Sections that form a text, one line each; empty takes all. For shards of images with
    reports.
    """
    extra_train: tuple[Path, ...] = ()
    """Further folders of shards, shuffled together with `train`."""
    weights: tuple[float, ...] = ()
    """Shares of `train` and of each of `extra_train` in an epoch, of any sum; empty: by size."""

    def inputs(self) -> Iterator[tuple[str, Path, str]]:
        """Yield (field, folder, file that it must contain) of the local folders that the run
        reads.
        """
        yield from LoaderConfig.inputs(self)
        for path in self.extra_train:
            yield "extra_train", path, MANIFEST
        if self.tokenizer is not None:
            yield "tokenizer", self.tokenizer, "tokenizer.json"


@open_data.register
def open_text(data: TextDataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a run on text for this rank.

    Raises ShardError where a folder is damaged, SplitError where training and validation share a
    document, ConfigError where the batch does not fit the ranks, or the model's tokenizer cannot
    mask words.
    """
    from medvl.data.loading.sources import ConcatSource
    from medvl.data.loading.text_loader import open_text_loader
    from medvl.data.shards.source import ShardSource

    check_tokenizer(model)
    train, valid = open_split(data)
    source: Any = train
    if data.extra_train or data.weights:
        source = ConcatSource([train, *map(ShardSource, data.extra_train)], data.weights or None)
        if valid is not None:
            check_against(source.manifest, valid.manifest)
    options: dict[str, Any] = {
        "opener": open_text_loader,
        "sequences": model.sequences,
        "sections": data.sections,
    }
    loader = open_train(data, source, micro_batch, **options)
    selection = {"weights": list(data.weights)} if data.weights else {}
    entries = describe(source.manifest, None if valid is None else valid.manifest, **selection)
    if valid is None:
        return DataLoaders(loader, None, None, entries)
    losses = open_valid(data, valid, **options)
    return DataLoaders(loader, losses, open_valid(data, valid, shared=False, **options), entries)


def text_run(
    name: str,
    make_data: str,
    phantom: str = "",
    *,
    evaluator: Callable[[Any], "Evaluator"] = MaskedWordScore,
) -> "Callable[[Recipe[Any, TextDataConfig]], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.

    Validation prints, besides the losses, what `evaluator` returns.
    """
    pretraining = pretraining_run(name, make_data, phantom)

    def prepare(recipe: "Recipe[Any, TextDataConfig]") -> "Run":
        """Create the model, the loaders and the evaluator."""
        return pretraining(recipe).with_evaluator(evaluator)

    return prepare
