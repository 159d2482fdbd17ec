"""The shard writer: one tar and its index, written atomically."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from medvl.common.files import write_atomic
from medvl.data.convert.record import EncodedSample
from medvl.data.shards.format import NO_IMAGE, Index, Shard
from medvl.data.shards.tar_writer import TarWriter, new_tar


def write_shard(folder: Path, name: str, samples: Iterable[EncodedSample]) -> Shard:
    """Write `{name}.tar` and `{name}.index`. Returns the manifest entry.

    Raises OSError when writing fails. No partial tar is left then, or when the process is interrupted.
    """
    tar = folder / f"{name}.tar"
    with new_tar(tar) as writer:
        index = _write_members(writer, samples)
        writer.close()
        index_text = index.to_text()
        write_atomic(tar.with_suffix(".index"), index_text)
    return Shard(
        name=name,
        samples=len(index.keys),
        bytes=writer.offset,
        sha256=writer.hash.hexdigest(),
        index_sha256=hashlib.sha256(index_text.encode()).hexdigest(),
    )


def _write_members(writer: TarWriter, samples: Iterable[EncodedSample]) -> Index:
    keys, suffixes, places = [], [], []
    for sample in samples:
        keys.append(sample.key)
        suffixes.append(sample.suffix)
        has_image = sample.suffix != NO_IMAGE
        image_place = writer.member(f"{sample.key}.{sample.suffix}", sample.image) if has_image else (0, 0)
        places.append((*image_place, *writer.member(f"{sample.key}.json", sample.meta)))
    places_N4 = np.array(places, np.int64).reshape(-1, 4)
    return Index(tuple(keys), tuple(suffixes), places_N4[:, :2], places_N4[:, 2:])
