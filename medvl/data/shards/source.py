"""Random access to the samples of a folder of shards."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from medvl.data.images.codecs import decode_image
from medvl.data.shards.format import (
    NO_IMAGE,
    VOLUME_SUFFIX,
    Index,
    Manifest,
    Shard,
    label_row,
    sample_from_json,
)
from medvl.data.shards.regions import NO_REGIONS, RegionManifest, RegionReader, Regions
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.data.storage.tars import FolderFiles, open_tars
from medvl.data.volumes.codec import decode_volume, read_volume_header, stored_volume
from medvl.data.volumes.transform import stored_shape
from medvl.data.volumes.volume import Volume
from medvl.errors import ImageError, ShardError, VolumeError
from medvl.schema import Sample

_NEIGHBOURS = 4096
"""Largest gap between the image and the JSON of a sample that are requested together."""


class ShardSource:
    """Samples of one folder of shards, by position.

    The manifest, every index and the size of every tar are read and checked here, so a damaged
    folder fails before training starts. Tars are opened on first use in each process, so a source
    can be passed to loader workers.

    Args:
        folder: folder of shards, or its address: s3://, gs://, az://, hf:// or https://
            (`medvl.data.storage`).
        regions: name of the region features to read too (`medvl regions`); None for none.
        cache: local cache of remote shards; default: from MEDVL_CACHE and MEDVL_CACHE_SIZE.

    Attributes:
        region_manifest: manifest of the regions, None without.
        has_volumes: whether samples have volumes in place of images.
        has_organs: whether volumes have masks of organs.

    Raises:
        ShardError: a file is missing or damaged, or belongs to another folder.
        StorageError: a remote store cannot be reached or refuses access.
    """

    def __init__(
        self, folder: Location | str, *, regions: str | None = None, cache: Cache | None = None
    ) -> None:
        self.folder = locate(folder)
        self.is_remote = isinstance(self.folder, RemotePath)
        cache = cache or (Cache.from_environment() if self.is_remote else None)
        self.manifest = Manifest.read(self.folder)
        self.label_names = self.manifest.label_names
        self.fingerprint = self.manifest.fingerprint
        files = FolderFiles(self.folder, cache)
        self._indexes = list(
            files.map(lambda shard: self._open_index(shard, files), self.manifest.shards)
        )
        counts = [len(index.keys) for index in self._indexes]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        paths = [self.folder / f"{shard.name}.tar" for shard in self.manifest.shards]
        self._tars = open_tars(paths, self.manifest.shards, cache)
        self.has_volumes = any(VOLUME_SUFFIX in index.suffixes for index in self._indexes)
        self.has_organs = any(index.organs for index in self._indexes)
        if len(self) != self.manifest.samples:
            expected = (
                f"expected {self.manifest.samples} samples by the manifest, got "
                f"{len(self)} in the indexes"
            )
            raise ShardError(f"{self.folder}: {expected}; convert the corpus again", "mismatch")
        self.region_manifest: RegionManifest | None = None
        if regions is not None:
            keys = [index.keys for index in self._indexes]
            self._regions = RegionReader(self.folder, regions, self.manifest, keys, cache)
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
        """Yield the texts of each study once, all or some sections: images of one study share
        their report.
        """
        studies = set()
        for position in range(len(self)):
            sample = self.sample(position)
            if sample.study not in studies:
                studies.add(sample.study)
                yield [
                    sample.sections[name]
                    for name in sections or sample.sections
                    if name in sample.sections
                ]

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels. Raises ShardError naming the
        shard and the key.
        """
        shard, row = self._locate(position)
        index = self._indexes[shard]
        data = self._read(shard, row, index.meta[row])
        try:
            sample = sample_from_json(data)
        except ValueError as error:
            raise self._damaged(
                shard, index.keys[row], "its JSON cannot be read", "malformed"
            ) from error
        if sample.key != index.keys[row]:
            raise self._damaged(
                shard, index.keys[row], "the tar holds another sample at this offset", "mismatch"
            )
        return sample

    def image_bytes(self, position: int) -> bytes:
        """Return the encoded image. Raises ShardError, and ImageError `no_image` where the
        sample has none.
        """
        shard, row = self._locate(position)
        index = self._indexes[shard]
        if index.suffixes[row] == NO_IMAGE:
            raise ImageError(f"{self.folder}: sample {index.keys[row]} has no image", "no_image")
        return self._read(shard, row, index.image[row])

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image: uint8 (H, W), or (H, W, 3) with `color`. Raises ImageError or
        ShardError.

        None: in colour where the shards are (`ShardOptions.color`).
        """
        if self.has_volume(position):
            message = f"{self.folder}: sample {self.key(position)} is a volume; call volume()"
            raise ImageError(message, "unsupported")
        return decode_image(
            self.image_bytes(position), color=self.manifest.color if color is None else color
        )

    def volume(self, position: int, slices: slice | None = None) -> Volume:
        """Return the volume of a sample, or some slices in a row along z.

        Raises ShardError, and ImageError `no_image` where the sample has no volume.
        """
        if not self.has_volume(position):
            raise ImageError(
                f"{self.folder}: sample {self.key(position)} has no volume", "no_image"
            )
        try:
            data = self.image_bytes(position)
            values = decode_volume(data, slices)
            extra = self.sample(position).extra
            if read_volume_header(data).shape != stored_shape(extra):
                raise ValueError("its JSON has another shape than the volume")
            return stored_volume(values, extra)
        except (VolumeError, ValueError) as error:
            code = error.code if isinstance(error, VolumeError) else "malformed"
            shard, _ = self._locate(position)
            raise self._damaged(shard, self.key(position), str(error), code) from error

    def organs(self, position: int, slices: slice | None = None) -> np.ndarray | None:
        """Return the organ of each voxel of a volume (`medvl.data.volumes.organs`), uint8, or of
        some slices in a row along z; None where the sample has no masks. Raises ShardError.
        """
        shard, row = self._locate(position)
        index = self._indexes[shard]
        if row not in index.organs:
            return None
        try:
            data = self._read(shard, row, np.array(index.organs[row]))
            header = read_volume_header(data)
            shape = stored_shape(self.sample(position).extra)
            if (header.dtype, header.shape) != (np.uint8, shape):
                raise ValueError("its organs are not on the grid of the volume")
            return decode_volume(data, slices)
        except (VolumeError, ValueError) as error:
            code = error.code if isinstance(error, VolumeError) else "malformed"
            raise self._damaged(shard, index.keys[row], str(error), code) from error

    def volume_bytes(self, position: int) -> int:
        """Return the stored bytes of a sample's volume or image, 0 without one."""
        shard, row = self._locate(position)
        return int(self._indexes[shard].image[row, 1])

    def has_volume(self, position: int) -> bool:
        """Return whether the sample at `position` has a volume in place of an image."""
        shard, row = self._locate(position)
        return self._indexes[shard].suffixes[row] == VOLUME_SUFFIX

    def has_image(self, position: int) -> bool:
        """Return whether the sample at `position` has an image or a volume."""
        shard, row = self._locate(position)
        return self._indexes[shard].suffixes[row] != NO_IMAGE

    def regions(self, position: int) -> Regions:
        """Return the regions of the image. Raises ShardError, and ImageError `no_image` or
        `no_regions`.
        """
        if not self.has_image(position):
            raise ImageError(f"{self.folder}: sample {self.key(position)} has no image", "no_image")
        regions = self._regions.read(*self._locate(position))
        if regions is None:
            message = (
                f"{self._regions.folder}: the detector could not read the image of "
                f"{self.key(position)}"
            )
            raise ImageError(message, NO_REGIONS)
        return regions

    def labels(self, sample: Sample) -> np.ndarray:
        """Return the labels in the order of `label_names`: float32 (L,), 1, 0, -1 or NaN."""
        return label_row(sample.labels, self.label_names)

    def _open_index(self, shard: Shard, files: FolderFiles) -> Index:
        path = self.folder / f"{shard.name}.tar"
        try:
            size = files.size(path)
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist; copy it, or convert the corpus again", "not_found"
            ) from None
        if size != shard.bytes:
            raise ShardError(
                f"{path}: expected {shard.bytes} bytes, got {size}; copy it again", "mismatch"
            )
        place = path.with_suffix(".index")
        try:
            index = Index.read(place, files.verified(place, shard.index_sha256))
        except FileNotFoundError:
            raise ShardError(
                f"{place} does not exist; copy the .index files too", "not_found"
            ) from None
        ends = np.concatenate(
            [index.image.sum(axis=1), index.meta.sum(axis=1), list(map(sum, index.organs.values()))]
        )
        if len(index.keys) != shard.samples or (len(ends) and ends.max() > size):
            raise ShardError(f"{place} does not fit its tar; convert again", "mismatch")
        return index

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        shard = int(np.searchsorted(self._first, position, side="right")) - 1
        return shard, position - int(self._first[shard])

    def _read(self, shard: int, row: int, place: np.ndarray) -> bytes:
        """Return a member. A remote one is requested with the sample's other one: they are
        neighbours in the tar.
        """
        index = self._indexes[shard]
        span = None
        if self.is_remote and index.suffixes[row] != NO_IMAGE:
            members_22 = np.stack([index.image[row], index.meta[row]])
            start = int(members_22[:, 0].min())
            end = int(members_22.sum(axis=1).max())
            span = (
                (start, end - start)
                if end - start <= members_22[:, 1].sum() + _NEIGHBOURS
                else None
            )
        try:
            return self._tars.read(shard, int(place[0]), int(place[1]), span)
        except (EOFError, FileNotFoundError):
            raise self._damaged(
                shard, index.keys[row], "the tar ends before it", "truncated"
            ) from None

    def _damaged(self, shard: int, key: str, problem: str, code: str) -> ShardError:
        path = self.folder / f"{self.manifest.shards[shard].name}.tar"
        return ShardError(
            f"{path} is damaged at sample {key}: {problem}; run `medvl verify {self.folder}` to "
            f"list all damage",
            code,
        )
