"""Profile of a loader: seconds of one core per sample, by stage."""

import dataclasses
from time import perf_counter
from typing import Any

import numpy as np

from medvl.data.loading.items import SkippedSample
from medvl.data.loading.loader import Loader, SampleDataset
from medvl.errors import ImageError, MedvlError
from medvl.schema import Sample

STAGES = ("disk", "decode", "augmentation", "text")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Seconds of one core per sample, by stage."""

    disk: float
    """First read minus second read of a sample: zero if its pages were already in memory."""
    decode: float
    """JSON and image, read from memory; for models of regions or volumes, those in place of the
    image.
    """
    augmentation: float
    text: float
    """Text selection, tokenization and stacking, per sample."""

    @property
    def total(self) -> float:
        """Sum of all stages."""
        return sum(getattr(self, name) for name in STAGES)


def time_stages(loader: Loader, batch: int, batches: int = 2, seed: int = 0) -> Stages:
    """Return mean times over `batches` random batches of `batch` samples, measured in this process.

    Unreadable samples are left out. Raises ImageError when no sample can be read.
    """
    samples = loader.samples
    spent = np.zeros(len(STAGES))
    count = 0
    positions = (
        np.random.default_rng(seed).integers(len(loader.source), size=(batches, batch)).tolist()
    )
    for row in positions:
        items = []
        for position in row:
            clock = _Stopwatch()
            try:
                _read(samples, position)
                first = clock.lap()
                sample, stored = _read(samples, position)
                second = clock.lap()
                image = samples.reader.views(0, sample.key, sample, stored)
                augmented = clock.lap()
                items.append(samples.maker.row(sample, image, 0, None))
            except (MedvlError, FileNotFoundError):
                continue
            spent += (max(0.0, first - second), second, augmented, clock.lap())
            count += 1
        clock = _Stopwatch()
        loader.collate(items or [SkippedSample("", "unreadable")])
        spent[-1] += clock.lap()
    if not count:
        raise ImageError(
            "no sample can be read; run `medvl verify` to list the damage", "unreadable"
        )
    disk, decode, augmentation, text = (float(seconds) / count for seconds in spent)
    return Stages(disk=disk, decode=decode, augmentation=augmentation, text=text)


def _read(samples: SampleDataset, position: int) -> tuple[Sample, Any]:
    sample = samples.source.sample(position)
    return sample, samples.reader.read(0, position, sample.key, sample)


class _Stopwatch:
    def __init__(self) -> None:
        self._last = perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, or since creation."""
        now = perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds
