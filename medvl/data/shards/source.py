"""Random access to the samples of a folder of shards."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from medvl.data.images.codecs import decode_image
from medvl.data.shards.format import NO_IMAGE, Index, Manifest, Shard, label_row, sample_from_json
from medvl.data.shards.mapped_tars import MappedTars
from medvl.data.shards.regions import NO_REGIONS, RegionManifest, RegionReader, Regions
from medvl.errors import ImageError, ShardError
from medvl.schema import Sample


class ShardSource:
    """Samples of one folder of shards, by position.

    The manifest, every index and the size of every tar are read and checked here, so a damaged folder fails before
    training starts. Tars are opened on first use in each process, so a source can be passed to loader workers.

    Args:
        folder: folder of shards.
        regions: name of the region features to read too (`medvl regions`); None for none.

    Attributes:
        region_manifest: manifest of the regions, None without.

    Raises ShardError when a file is missing or damaged, or belongs to another folder.
    """

    def __init__(self, folder: Path | str, *, regions: str | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.label_names = self.manifest.label_names
        self.fingerprint = self.manifest.fingerprint
        self._indexes = [self._open_index(shard) for shard in self.manifest.shards]
        counts = [len(index.keys) for index in self._indexes]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._tars = MappedTars([self.folder / f"{shard.name}.tar" for shard in self.manifest.shards])
        if len(self) != self.manifest.samples:
            expected = f"expected {self.manifest.samples} samples by the manifest, got {len(self)} in the indexes"
            raise ShardError(f"{self.folder}: {expected}; convert the corpus again", "mismatch")
        self.region_manifest: RegionManifest | None = None
        if regions is not None:
            self._regions = RegionReader(self.folder, regions, self.manifest, [index.keys for index in self._indexes])
            self.region_manifest = self._regions.manifest
            content = f"{self.fingerprint} {self.region_manifest.fingerprint}"
            self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._first[-1])

    def key(self, position: int) -> str:
        """Return the key of the sample at `position`."""
        shard, row = self._locate(position)
        return self._indexes[shard].keys[row]

    def texts_by_study(self, sections: Sequence[str] = ()) -> Iterator[list[str]]:
        """Yield the texts of each study once, all or some sections: images of one study share their report."""
        studies = set()
        for position in range(len(self)):
            sample = self.sample(position)
            if sample.study not in studies:
                studies.add(sample.study)
                yield [sample.sections[name] for name in sections or sample.sections if name in sample.sections]

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels. Raises ShardError naming the shard and the key."""
        shard, row = self._locate(position)
        index = self._indexes[shard]
        data = self._read(shard, index.meta[row], index.keys[row])
        try:
            sample = sample_from_json(data)
        except ValueError as error:
            raise self._damaged(shard, index.keys[row], "its JSON cannot be read", "malformed") from error
        if sample.key != index.keys[row]:
            raise self._damaged(shard, index.keys[row], "the tar holds another sample at this offset", "mismatch")
        return sample

    def image_bytes(self, position: int) -> bytes:
        """Return the encoded image. Raises ShardError, and ImageError `no_image` where the sample has none."""
        shard, row = self._locate(position)
        index = self._indexes[shard]
        if index.suffixes[row] == NO_IMAGE:
            raise ImageError(f"{self.folder}: sample {index.keys[row]} has no image", "no_image")
        return self._read(shard, index.image[row], index.keys[row])

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """Return the decoded image: uint8 (H, W), or (H, W, 3) with `color`. Raises ImageError or ShardError."""
        return decode_image(self.image_bytes(position), color=color)

    def has_image(self, position: int) -> bool:
        """Return whether the sample at `position` has an image."""
        shard, row = self._locate(position)
        return self._indexes[shard].suffixes[row] != NO_IMAGE

    def regions(self, position: int) -> Regions:
        """Return the regions of the image. Raises ShardError, and ImageError `no_image` or `no_regions`."""
        if not self.has_image(position):
            raise ImageError(f"{self.folder}: sample {self.key(position)} has no image", "no_image")
        regions = self._regions.read(*self._locate(position))
        if regions is None:
            message = f"{self._regions.folder}: the detector could not read the image of {self.key(position)}"
            raise ImageError(message, NO_REGIONS)
        return regions

    def labels(self, sample: Sample) -> np.ndarray:
        """Return the labels in the order of `label_names`: float32 (L,), 1, 0, -1 or NaN."""
        return label_row(sample.labels, self.label_names)

    def _open_index(self, shard: Shard) -> Index:
        path = self.folder / f"{shard.name}.tar"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ShardError(f"{path} does not exist; copy it, or convert the corpus again", "not_found") from None
        if size != shard.bytes:
            raise ShardError(f"{path}: expected {shard.bytes} bytes, got {size}; copy it again", "mismatch")
        index = Index.read(path.with_suffix(".index"))
        ends = np.concatenate([index.image.sum(axis=1), index.meta.sum(axis=1)])
        if len(index.keys) != shard.samples or (len(ends) and ends.max() > size):
            raise ShardError(f"{path.with_suffix('.index')} does not fit its tar; convert again", "mismatch")
        return index

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        shard = int(np.searchsorted(self._first, position, side="right")) - 1
        return shard, position - int(self._first[shard])

    def _read(self, shard: int, place: np.ndarray, key: str) -> bytes:
        try:
            return self._tars.read(shard, int(place[0]), int(place[1]))
        except EOFError:
            raise self._damaged(shard, key, "the tar ends before it", "truncated") from None

    def _damaged(self, shard: int, key: str, problem: str, code: str) -> ShardError:
        path = self.folder / f"{self.manifest.shards[shard].name}.tar"
        return ShardError(
            f"{path} is damaged at sample {key}: {problem}; run `medvl verify {self.folder}` to list all damage", code
        )
