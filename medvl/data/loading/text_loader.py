"""Loader of training sequences of text alone, with the order, resuming and randomness of
`open_loader`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from medvl.common.ranks import check_ranks
from medvl.data.loading.collate import NO_TEXT
from medvl.data.loading.items import SkippedSample, sample_rng
from medvl.data.loading.loader import Loader, check_settings
from medvl.data.loading.sampler import batch_sampler
from medvl.data.loading.sources import Source
from medvl.data.loading.workers import TIMEOUT
from medvl.data.reports.sentences import join_texts
from medvl.errors import ShardError
from medvl.schema import Batch, Sample

_TRIES = 20


class SequenceMaker(Protocol):
    """Maker of the rows and the batches of a system: `TextSequences`, `ConceptPairs`."""

    def __call__(
        self, key: str, document: str, text: str, other: Callable[[], str], rng: Any
    ) -> Any:
        """Return the row of a text; `other()` returns the text of another document."""

    def collate(self, rows: Sequence[Any]) -> Batch:
        """Return the batch of some rows."""


class SequenceDataset(Dataset[Any]):
    """Sequences of a source, indexed by (epoch, position); runs in the loader's workers.

    A sample's text is all or some of its sections, a line each. Samples without text are skipped;
    they do not count as unreadable.
    """

    def __init__(
        self, source: Source, sequences: SequenceMaker, seed: int, sections: Sequence[str] = ()
    ) -> None:
        self.source = source
        self.sequences = sequences
        self.seed = seed
        self.sections = tuple(sections)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, position = place
        try:
            sample = self.source.sample(position)
        except ShardError as error:
            return SkippedSample(str(error), "sample_unreadable")
        text = self._text(sample)
        if not text:
            return SkippedSample(sample.key, NO_TEXT)
        rng = sample_rng(self.seed, epoch, sample.key, "sequence")
        return self.sequences(
            sample.key, sample.patient, text, lambda: self._other(sample, rng), rng
        )

    def _text(self, sample: Sample) -> str:
        names = self.sections or sample.sections
        return join_texts((sample.sections.get(name, "") for name in names), "\n")

    def _other(self, sample: Sample, rng: np.random.Generator) -> str:
        """Return the text of a random other document; empty where there is none that can be
        read.
        """
        for _ in range(_TRIES):
            try:
                other = self.source.sample(int(rng.integers(len(self.source))))
            except ShardError:  # counted when the sample itself is drawn
                continue
            if other.patient != sample.patient and (text := self._text(other)):
                return text
        return ""


def _collate(
    sequences: SequenceMaker, items: Sequence[Any]
) -> tuple[Batch | None, list[SkippedSample]]:
    rows = [item for item in items if not isinstance(item, SkippedSample)]
    skipped = [item for item in items if isinstance(item, SkippedSample)]
    return sequences.collate(rows) if rows else None, skipped


def open_text_loader(
    source: Source,
    sequences: SequenceMaker,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    workers: int = 0,
    max_skipped: float = 0.001,
    timeout: float = TIMEOUT,
    sections: Sequence[str] = (),
) -> Loader:
    """Open a loader of training sequences over a source with texts.

    Args:
        source: for example `ShardSource(folder)`, of text alone or of images with reports.
        sequences: maker of the sequences, of the model that is trained. batch, train, seed, rank,
            world, workers, max_skipped, timeout: as for `open_loader`. In evaluation the windows,
            pairs and masks are the same in every pass.
        sections: names of the sections that form the text; default all.

    Raises:
        ConfigError, BudgetError, ShardError, LoaderError: as `open_loader`.
    """
    rank, world = check_ranks(rank, world, train=train)
    check_settings(len(source), batch, train, world, workers)
    sampler = batch_sampler(source, batch, seed, rank, world, train=train)
    dataset: Any = SequenceDataset(source, sequences, seed, sections)
    collate = functools.partial(_collate, sequences)
    return Loader(
        source, sampler, dataset, collate, workers=workers, max_skipped=max_skipped, timeout=timeout
    )
