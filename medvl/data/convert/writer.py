"""The shard writer: one tar and its index, written atomically."""

import hashlib
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from medvl.common.files import write_atomic
from medvl.data.convert.record import EncodedSample
from medvl.data.shards.format import NO_IMAGE, Index, Shard

_BLOCK = tarfile.BLOCKSIZE


def write_shard(folder: Path, name: str, samples: Iterable[EncodedSample]) -> Shard:
    """Write `{name}.tar` and `{name}.index`. Returns the manifest entry.

    Raises OSError when writing fails. No partial tar is left then, or when the process is interrupted.
    """
    tar, index = folder / f"{name}.tar", folder / f"{name}.index"
    partial = tar.with_name(tar.name + ".partial")
    try:
        with partial.open("wb") as file:
            writer = _TarWriter(file)
            for sample in samples:
                writer.add(sample)
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        index_text = writer.index().to_text()
        write_atomic(index, index_text)
        partial.replace(tar)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Shard(
        name=name,
        samples=len(writer.keys),
        bytes=writer.offset,
        sha256=writer.hash.hexdigest(),
        index_sha256=hashlib.sha256(index_text.encode()).hexdigest(),
    )


class _TarWriter:
    """Tar with fixed member headers, so that equal content gives equal bytes; records the position of each member."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.offset = 0
        self.hash = hashlib.sha256()
        self.keys: list[str] = []
        self.suffixes: list[str] = []
        self.places: list[tuple[int, int, int, int]] = []

    def add(self, sample: EncodedSample) -> None:
        self.keys.append(sample.key)
        self.suffixes.append(sample.suffix)
        has_image = sample.suffix != NO_IMAGE
        image_place = self._member(f"{sample.key}.{sample.suffix}", sample.image) if has_image else (0, 0)
        meta_place = self._member(f"{sample.key}.json", sample.meta)
        self.places.append((*image_place, *meta_place))

    def index(self) -> Index:
        places = np.array(self.places, np.int64).reshape(-1, 4)
        return Index(tuple(self.keys), tuple(self.suffixes), places[:, :2], places[:, 2:])

    def close(self) -> None:
        self._write(bytes(2 * _BLOCK))

    def _member(self, name: str, data: bytes) -> tuple[int, int]:
        header = tarfile.TarInfo(name)  # its defaults: owner 0, time 0, mode 0644
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        place = (self.offset, len(data))
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return place

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.offset += len(data)
