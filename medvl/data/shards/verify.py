"""Verification of a folder of shards against its manifest, and search for patients and images shared by two folders."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from medvl.data.images.codecs import decode_image
from medvl.data.shards.duplicate_images import SharedImage, hash_images, shared_images
from medvl.data.shards.format import IMAGE_SUFFIXES, NO_IMAGE, Index, Manifest, Shard, sample_from_json
from medvl.data.shards.source import ShardSource
from medvl.data.shards.tar_reader import read_members
from medvl.data.shards.verify_regions import RegionVerification, check_hashes, unlisted_files, verify_regions
from medvl.data.storage.location import Location, local_copy, locate
from medvl.errors import ImageError, ShardError, SplitError

_REPEATS = ("duplicate_line", "second_caption_ignored")
"""Reasons for leaving out a row whose image has another row."""
_MAX_PROBLEMS = 1000
"""Problems of one tar after which the rest of it is not read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying one folder."""

    folder: Location
    manifest: Manifest
    problems: tuple[str, ...]
    """Empty when the folder is intact."""
    regions: tuple[RegionVerification, ...] = ()
    """Results of the folder's regions (`medvl regions`)."""


def verify_folder(folder: str | Location, *, decode: bool = False, progress: bool = False) -> Verification:
    """Check every byte of a folder of shards, or of a remote one, against its manifest.

    Compares the sha256 of each tar and index, compares the members of each tar with its index, parses each sample, and
    compares the numbers of samples, patients and planned images; likewise for the folder's regions. With `decode`,
    decodes every image too.

    Remote shards are downloaded one after another; the cache is not used.

    Raises ShardError when there is no readable manifest, StorageError when a store cannot be reached; everything else
    is returned as a problem.
    """
    return verify_shards(folder, Manifest.read(folder), decode=decode, progress=progress)


def verify_shards(
    folder: str | Location, manifest: Manifest, *, decode: bool = False, progress: bool = False
) -> Verification:
    """Check a folder as `verify_folder` does, against a manifest that need not be in the folder."""
    folder = locate(folder)
    problems: list[str] = []
    patients: set[str] = set()
    keys: set[str] = set()
    for shard in tqdm(manifest.shards, desc=f"verify {manifest.split}", disable=not progress):
        with local_copy(folder, [f"{shard.name}.tar", f"{shard.name}.index"]) as local:
            problems += _check_shard(local, shard, manifest, keys, patients, decode)
    problems += unlisted_files(folder, manifest.shards)
    if not problems:
        problems += _check_totals(manifest, keys, patients)
    return Verification(folder, manifest, tuple(problems), tuple(verify_regions(folder, manifest)))


def check_against(manifest: Manifest, other: Manifest) -> None:
    """Raise SplitError when two manifests share a patient, or cannot be compared because their salts differ.

    Synthetic images count as the training data of their generators; where that has another salt, it is not compared.
    """
    pair = f"{manifest.corpus}/{manifest.split} and {other.corpus}/{other.split}"
    if manifest.salt != other.salt:
        message = f"{pair} were hashed with different salts; convert both with one --salt-file"
        raise SplitError(message, "mismatch", field="salt")
    shared = shared_patients(manifest, other)
    if shared:
        patients = f"{len(shared)} patients (first by hash: {min(shared)})"
        raise SplitError(f"{pair} share {patients}; a score on one is not held out from the other", "leak")
    for seen in itertools.islice(manifest.lineage(), 1, None):
        if seen.salt == other.salt:
            check_against(seen, other)


def shared_patients(manifest: Manifest, other: Manifest) -> set[str] | None:
    """Return the hashed patients (articles, for figures) in both manifests; None if their salts differ."""
    return set(manifest.patients) & set(other.patients) if manifest.salt == other.salt else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Patients and images that two folders of shards share."""

    name: str
    """Corpus and split."""
    other: str
    patients: set[str] | None
    """Hashed patients. None: unknown, because the salts differ."""
    images: list[SharedImage]
    """Images with equal pixels, whatever their keys."""
    not_compared: Counter[str]
    """Images of either folder without a perceptual hash, by reason."""


def find_overlaps(
    folders: Sequence[Location], others: Sequence[Location], *, progress: bool = False
) -> Iterator[Overlap]:
    """Compare each of `folders` with each of `others`; every image is hashed once. Raises ShardError."""
    left, right = ([ShardSource(folder) for folder in part] for part in (folders, others))
    hashed, hashed_others = ([hash_images(source, progress=progress) for source in part] for part in (left, right))
    for source, images in zip(left, hashed, strict=True):
        for other, other_images in zip(right, hashed_others, strict=True):
            yield Overlap(
                name=f"{source.manifest.corpus}/{source.manifest.split}",
                other=f"{other.manifest.corpus}/{other.manifest.split}",
                patients=shared_patients(source.manifest, other.manifest),
                images=shared_images(images, other_images),
                not_compared=images.not_hashed + other_images.not_hashed,
            )


def compare_counts(manifests: Mapping[str, Manifest], expected: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the counts that differ from the data card's: name -> (actual, expected).

    `images` is the total over all splits. Excluded and skipped images count as present: the manifest lists them.
    """
    actual = {split: manifest.planned for split, manifest in manifests.items()}
    actual["images"] = sum(actual.values()) + max(map(_images_left_out, manifests.values()), default=0)
    return {name: (actual.get(name, 0), count) for name, count in expected.items() if actual.get(name, 0) != count}


def _images_left_out(manifest: Manifest) -> int:
    """Return the images of the corpus that were left out before conversion; none where it counts other rows."""
    if manifest.rows.get("unit", "images") != "images":
        return 0
    left_out = Counter(manifest.excluded_from_corpus) + Counter(manifest.rows.get("skipped", {}))
    return sum(count for reason, count in left_out.items() if reason not in _REPEATS)


def _check_shard(
    folder: Path, shard: Shard, manifest: Manifest, keys: set[str], patients: set[str], decode: bool
) -> list[str]:
    tar = folder / f"{shard.name}.tar"
    if differing := check_hashes(tar, shard):
        return differing
    try:
        index = Index.read(tar.with_suffix(".index"))
        return _check_members(tar, index, shard, manifest, keys, patients, decode)
    except ShardError as error:
        return [f"{tar.name}: {error}"]


def _check_members(
    tar: Path, index: Index, shard: Shard, manifest: Manifest, keys: set[str], patients: set[str], decode: bool
) -> list[str]:
    problems = []
    expected = {}
    for row, key in enumerate(index.keys):
        if index.suffixes[row] != NO_IMAGE:
            expected[f"{key}.{index.suffixes[row]}"] = index.image[row]
        expected[f"{key}.json"] = index.meta[row]
    with tar.open("rb") as file:
        for member in read_members(file, "the tar"):
            place = expected.pop(member.name, None)
            if place is None or not np.array_equal(place, (member.offset, len(member.data))):
                problems.append(f"{tar.name}: member {member.name!r} does not match the index")
            else:
                problems += _check_member(tar, member.name, member.data, manifest, patients, decode)
            if len(problems) > _MAX_PROBLEMS:
                return [*problems, f"{tar.name}: too many problems; the rest of it was not read"]
    problems += [f"{tar.name}: {name} is in the index but not in the tar" for name in expected]
    problems += [f"{tar.name}: duplicate key {key}" for key in index.keys if key in keys]
    keys.update(index.keys)
    if len(index.keys) != shard.samples:
        problems.append(f"{tar.name}: {len(index.keys)} samples, {shard.samples} in the manifest")
    return problems


def _check_member(tar: Path, name: str, data: bytes, manifest: Manifest, patients: set[str], decode: bool) -> list[str]:
    key, _, suffix = name.rpartition(".")
    if suffix in IMAGE_SUFFIXES:
        if decode:
            try:
                decode_image(data)
            except ImageError as error:
                return [f"{tar.name}: {name}: {error}"]
        return []
    try:
        sample = sample_from_json(data)
    except ValueError as error:
        return [f"{tar.name}: {name}: {error}"]
    patients.add(sample.patient)
    if (sample.key, sample.corpus, sample.split) != (key, manifest.corpus, manifest.split):
        return [f"{tar.name}: {name} has another key, corpus or split"]
    if not set(sample.labels) <= set(manifest.label_names):
        return [f"{tar.name}: {name} has labels that are not in the manifest"]
    return []


def _check_totals(manifest: Manifest, keys: set[str], patients: set[str]) -> list[str]:
    problems = []
    if len(keys) != manifest.samples:
        problems.append(f"{len(keys)} samples in the shards, {manifest.samples} in the manifest")
    if patients != set(manifest.patients):
        problems.append(f"{len(patients)} patients in the shards, {len(manifest.patients)} in the manifest")
    accounted = manifest.samples + sum(manifest.excluded.values()) + sum(manifest.skipped.values())
    if accounted != manifest.planned:
        problems.append(f"{manifest.planned} images were planned, {accounted} are accounted for")
    if len(manifest.skipped_keys) != sum(manifest.skipped.values()):
        problems.append("the number of listed skipped images differs from their count")
    return problems
