"""A source of pairs as pairs, images alone and texts alone, for training on data that are mostly unpaired."""

import dataclasses
from typing import Literal

import numpy as np

from medvl.data.loading.subset import SourceView, label_fraction
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, ImageError
from medvl.schema import Sample

_PAIR, _IMAGE, _TEXT = range(3)


class UnpairedSource(SourceView):
    """The pairs of some patients; the samples of all others are an image without a text and a text without an image.

    The text alone has the key of its pair with `-text`, and both keep the labels. Pairs come first, then the images,
    then the texts. Reads all samples once.

    Args:
        source: the pairs.
        paired_fraction: fraction of the patients whose samples stay pairs, from 0 to 1. The patients of a smaller
            fraction are among those of a larger one (`medvl.data.loading.subset.label_fraction`).
        seed: seed of the order of the patients.
        others: "separate" the samples of the other patients, or "drop" them, to see what they are worth.

    Raises ConfigError where the fraction is out of range, or nothing is left.
    """

    def __init__(
        self,
        source: ShardSource,
        paired_fraction: float,
        seed: int = 0,
        others: Literal["separate", "drop"] = "separate",
    ) -> None:
        if not 0 <= paired_fraction <= 1 or (paired_fraction == 0 and others == "drop"):
            message = (
                f"expected a fraction from 0 to 1, and pairs or unpaired samples, got {paired_fraction:g}, {others}"
            )
            raise ConfigError(message, "out_of_range", field="paired_fraction")
        everything = np.arange(len(source))
        patients = [source.sample(position).patient for position in range(len(source))]
        paired = label_fraction(patients, paired_fraction, seed) if paired_fraction else everything[:0]
        alone = np.setdiff1d(everything, paired) if others == "separate" else everything[:0]
        self._positions = np.concatenate([paired, alone, alone])
        self._kinds = np.repeat([_PAIR, _IMAGE, _TEXT], [len(paired), len(alone), len(alone)])
        content = source.fingerprint.encode() + self._positions.astype("<i8").tobytes()
        super().__init__(source, content + self._kinds.astype("<i8").tobytes())
        self.manifest = source.manifest

    def __len__(self) -> int:
        return len(self._positions)

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`; an image alone has no sections. Raises ShardError."""
        sample = self.source.sample(int(self._positions[position]))
        if self._kinds[position] == _IMAGE:
            return dataclasses.replace(sample, sections={})
        return dataclasses.replace(sample, key=f"{sample.key}-text") if self._kinds[position] == _TEXT else sample

    def source_position(self, position: int) -> int:
        """See the base class. Raises ImageError, `no_image`, for a text alone."""
        if self._kinds[position] == _TEXT:
            raise ImageError(f"{self.folder}: sample {position} has no image: it was separated", "no_image")
        return int(self._positions[position])
