"""Several folders of shards as one source, for pretraining on more than one corpus."""

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medvl.data.loading.unpair import UnpairedSource
from medvl.data.shards.format import Manifest
from medvl.data.shards.regions import Regions, check_one_detector
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError
from medvl.schema import Sample


class ConcatSource:
    """The samples of several folders of shards, one folder after another.

    Args:
        sources: the folders.
        weights: share of each in training, of any sum; None draws every sample once an epoch.

    Attributes:
        folder: all folders, for messages.
        label_names: label names of all folders, in order of first appearance.
        counts: samples of each folder.
        manifest: merged manifest that a checkpoint stores: shards and patients of all folders. With a folder in colour
            it is in colour, as loaders read all folders then.
        region_manifest: that of the first folder's regions; the others have the same detector.

    Raises:
        ConfigError: no folder is given, one is given twice, or their ids were hashed with different salts, so that
            patients shared with an evaluation set could not be detected; or the weights do not fit, or the folders have
            regions of different detectors.
    """

    def __init__(self, sources: Sequence[ShardSource | UnpairedSource], weights: Sequence[float] | None = None) -> None:
        self.sources = tuple(sources)
        fingerprints = [source.fingerprint for source in self.sources]
        if not self.sources:
            raise ConfigError("expected one or more folders of shards, got none", "missing")
        if len(set(fingerprints)) < len(fingerprints):
            raise ConfigError("the same folder of shards is given twice; give each once", "conflict")
        self.manifest = _merge([source.manifest for source in self.sources])
        self.label_names = self.manifest.label_names
        self.counts, self.weights = tuple(map(len, self.sources)), None if weights is None else tuple(weights)
        if self.weights is not None:
            _check_weights(self.weights, len(self.sources))
            fingerprints.append(f"weights {self.weights}")
        self.fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()
        self.folder = ", ".join(str(source.folder) for source in self.sources)
        self.region_manifest = self.sources[0].region_manifest
        check_one_detector([source.region_manifest for source in self.sources])
        self._ends = np.cumsum([len(source) for source in self.sources]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels. Raises ShardError."""
        source, place = self._locate(position)
        return source.sample(place)

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.pixels(place, color)

    def regions(self, position: int) -> Regions:
        """Return the regions of the image. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.regions(place)

    def _locate(self, position: int) -> tuple[ShardSource | UnpairedSource, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        number = bisect.bisect_right(self._ends, position)
        return self.sources[number], position - (self._ends[number - 1] if number else 0)


def _check_weights(weights: Sequence[float], folders: int) -> None:
    if len(weights) != folders:
        message = f"expected a weight for each of the {folders} folders, got {len(weights)}"
        raise ConfigError(message, "mismatch", field="weights")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"expected positive weights, got {tuple(weights)}", "out_of_range", field="weights")


def _merge(manifests: Sequence[Manifest]) -> Manifest:
    if len({manifest.salt for manifest in manifests}) > 1:
        message = "the folders were hashed with different salts; convert them with one --salt-file"
        raise ConfigError(message, "mismatch", field="salt")
    return dataclasses.replace(
        manifests[0],
        corpus="+".join(manifest.corpus for manifest in manifests),
        samples=sum(manifest.samples for manifest in manifests),
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
        label_names=tuple(dict.fromkeys(name for manifest in manifests for name in manifest.label_names)),
        options={**manifests[0].options, "color": any(manifest.color for manifest in manifests)},
        patients=tuple(sorted({patient for manifest in manifests for patient in manifest.patients})),
        generators=_distinct([generator for manifest in manifests for generator in manifest.generators]),
    )


def _distinct(generators: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(each for place, each in enumerate(generators) if each not in generators[:place])
