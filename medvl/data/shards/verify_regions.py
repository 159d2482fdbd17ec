"""Verification of the regions of a folder of shards against their manifests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.common.files import sha256
from medvl.data.shards.format import REGION_SUFFIX, Manifest, Shard
from medvl.data.shards.regions import REGIONS, RegionManifest, Regions, RegionShard, read_index
from medvl.data.shards.tar_reader import read_members
from medvl.data.storage.location import Location, local_copy
from medvl.errors import ShardError


@dataclasses.dataclass(frozen=True, slots=True)
class RegionVerification:
    """Result of verifying one folder of regions."""

    name: str
    manifest: RegionManifest | None
    problems: tuple[str, ...]
    """Empty when the folder is intact."""


def verify_regions(folder: Location, manifest: Manifest) -> list[RegionVerification]:
    """Check every byte of the regions of a folder of shards: hashes, members, indexes, form, and the shards' hashes."""
    found = [path for path in (folder / REGIONS).glob("*") if path.is_dir()]
    return [_verify(path, manifest) for path in sorted(found, key=str)]


def _verify(folder: Location, shards: Manifest) -> RegionVerification:
    try:
        manifest = RegionManifest.read(folder)
    except ShardError as error:
        return RegionVerification(folder.name, None, (str(error),))
    problems: list[str] = []
    try:
        manifest.check_shards(shards, folder)
    except ShardError as error:
        problems.append(str(error))
    for shard in manifest.shards:
        try:
            with local_copy(folder, [f"{shard.name}.tar", f"{shard.name}.index"]) as local:
                problems += _check_shard(local, shard, manifest)
        except ShardError as error:
            problems.append(f"{shard.name}.tar: {error}")
    problems += unlisted_files(folder, manifest.shards)
    return RegionVerification(folder.name, manifest, tuple(problems))


def unlisted_files(folder: Location, shards: Sequence[Shard | RegionShard]) -> list[str]:
    """Return a problem for each tar and index of a folder that is not in its manifest."""
    found = {path.name for path in folder.glob("*") if path.suffix in (".tar", ".index")}
    listed = {shard.name + suffix for shard in shards for suffix in (".tar", ".index")}
    return [f"{name} is not in the manifest" for name in sorted(found - listed)]


def check_hashes(tar: Path, shard: Shard | RegionShard) -> list[str]:
    """Return a problem where a tar or its index is missing or not the one of the manifest."""
    for path, expected in ((tar, shard.sha256), (tar.with_suffix(".index"), shard.index_sha256)):
        try:
            if sha256(path) != expected:
                return [f"{path.name}: sha256 differs from the manifest"]
        except FileNotFoundError:
            return [f"{path.name} is missing"]
    return []


def _check_shard(folder: Path, shard: RegionShard, manifest: RegionManifest) -> list[str]:
    tar = folder / f"{shard.name}.tar"
    if differing := check_hashes(tar, shard):
        return differing
    keys, place_N2 = read_index(tar.with_suffix(".index"))
    rows = {f"{key}.{REGION_SUFFIX}": place_N2[row] for row, key in enumerate(keys) if place_N2[row, 1]}
    images, regions, problems = len(rows), 0, []
    with tar.open("rb") as file:
        for member in read_members(file, "the tar"):
            place = rows.pop(member.name, None)
            if place is None or not np.array_equal(place, (member.offset, len(member.data))):
                problems.append(f"{tar.name}: member {member.name!r} does not match the index")
                continue
            try:
                parsed = Regions.from_bytes(member.data, manifest.width, len(manifest.class_names))
            except ValueError as error:
                problems.append(f"{tar.name}: {member.name}: {error}")
                continue
            regions += len(parsed.boxes_P4)
            if not np.isfinite(parsed.features_PD).all():
                problems.append(f"{tar.name}: {member.name}: a feature is not finite")
    problems += [f"{tar.name}: {name} is in the index but not in the tar" for name in rows]
    if not problems and (len(keys), images, regions) != (shard.samples, shard.images, shard.regions):
        problems.append(f"{tar.name}: {len(keys)} samples, {images} images, {regions} regions differ from the manifest")
    return problems
