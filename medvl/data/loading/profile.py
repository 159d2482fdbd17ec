"""What a loader does for one sample, stage by stage, in seconds of one core."""

import dataclasses
from collections.abc import Iterator
from time import perf_counter

import numpy as np

from medvl.data.loading.collate import Failure
from medvl.data.loading.loader import Loader
from medvl.errors import ImageError, MedvlError

STAGES = ("disk", "decode", "augmentation", "text")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Seconds of one core a sample."""

    disk: float
    """What the first reading of a sample takes longer than the second: zero where its pages were in memory."""
    decode: float
    """The sample's JSON and the image's pixels, from memory."""
    augmentation: float
    text: float
    """Choosing the text, its share of tokenising, and of stacking the batch."""

    @property
    def total(self) -> float:
        """Of one sample."""
        return sum(getattr(self, name) for name in STAGES)


def time_stages(loader: Loader, batch: int, batches: int = 2, seed: int = 0) -> Stages:
    """Mean times over `batches` batches of that many samples, drawn at random; no worker takes part.

    Raises ImageError where not one of the samples can be read.
    """
    samples, spent, count = loader.samples, np.zeros(len(STAGES)), 0
    positions = np.random.default_rng(seed).integers(len(loader.source), size=(batches, batch)).tolist()
    for row in positions:
        items = []
        for position in row:
            clock = _laps()
            try:
                samples.source.pixels(position, samples.color)
                first = next(clock)
                sample = samples.source.sample(position)
                pixels = samples.source.pixels(position, samples.color)
                again = next(clock)
                image = samples.maker.transform(sample.key, pixels, 0)
                augmented = next(clock)
                items.append(samples.maker.row(sample, image, 0, None))
            except (MedvlError, FileNotFoundError):
                continue  # counted by whoever trains; here it is left out
            spent += (max(0.0, first - again), again, augmented, next(clock))
            count += 1
        clock = _laps()
        loader.collate(items or [Failure("", "unreadable")])
        spent[-1] += next(clock)
    if not count:
        raise ImageError("not one of the samples can be read: `medvl verify` names what is damaged", "unreadable")
    disk, decode, augmentation, text = (float(seconds) / count for seconds in spent)
    return Stages(disk=disk, decode=decode, augmentation=augmentation, text=text)


def _laps() -> Iterator[float]:
    """Seconds since the last one was taken; the clock runs already."""
    clock = _clock()
    next(clock)
    return clock


def _clock() -> Iterator[float]:
    last = perf_counter()
    while True:
        now = perf_counter()
        lap, last = now - last, now
        yield lap
