"""Several folders of shards as one source: pretraining on more than one corpus."""

import bisect
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from medvl.data.shards.format import Manifest, ShardSource
from medvl.errors import ConfigError
from medvl.schema import Sample


class JoinedSource:
    """The samples of one folder after those of another; the loader shuffles them all together.

    Attributes:
        folder: all of them, for messages.
        label_names: those of all folders, in the order in which they first appear.
        manifest: what a checkpoint keeps of its training data: all shards, and the patients of all folders.

    Raises:
        ConfigError: there is no folder, one is named twice, or their ids were hashed with different salts, so that
            nobody could tell whether a patient of one is in another's test.
    """

    def __init__(self, sources: Sequence[ShardSource]) -> None:
        self.sources = tuple(sources)
        fingerprints = [source.fingerprint for source in self.sources]
        if not self.sources or len(set(fingerprints)) < len(fingerprints):
            raise ConfigError("give folders of shards to train on, each once")
        self.manifest = _joined([source.manifest for source in self.sources])
        self.label_names = self.manifest.label_names
        self.fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()
        self.folder = ", ".join(str(source.folder) for source in self.sources)
        self._ends = np.cumsum([len(source) for source in self.sources]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, position: int) -> Sample:
        """Everything but the pixels. Raises ShardError as `ShardSource.sample` does."""
        source, place = self._locate(position)
        return source.sample(place)

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """The decoded image, as `ShardSource.pixels` gives it."""
        source, place = self._locate(position)
        return source.pixels(place, color)

    def _locate(self, position: int) -> tuple[ShardSource, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        number = bisect.bisect_right(self._ends, position)
        return self.sources[number], position - (self._ends[number - 1] if number else 0)


def _joined(manifests: Sequence[Manifest]) -> Manifest:
    first = manifests[0]
    if len({manifest.salt for manifest in manifests}) > 1:
        raise ConfigError("the folders were made with different salts: make them with one, so that patients compare")
    return dataclasses.replace(
        first,
        corpus="+".join(manifest.corpus for manifest in manifests),
        samples=sum(manifest.samples for manifest in manifests),
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
        label_names=tuple(dict.fromkeys(name for manifest in manifests for name in manifest.label_names)),
        patients=tuple(sorted({patient for manifest in manifests for patient in manifest.patients})),
    )
