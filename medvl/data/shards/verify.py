"""Proof that a folder of shards is what its manifest says, and that two folders share neither patient nor image."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from medvl.common.files import sha256
from medvl.data.images.codecs import decode_image
from medvl.data.shards.duplicate_images import SharedImage, hash_images, shared_images
from medvl.data.shards.format import IMAGE_SUFFIXES, Index, Manifest, Shard, ShardSource, sample_from_json
from medvl.data.shards.tar_reader import members
from medvl.errors import ImageError, ShardError, SplitError

_MOST_PROBLEMS = 1000
"""Of one tar, beyond which it is not worth reading."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """What was found in one folder."""

    folder: Path
    manifest: Manifest
    problems: tuple[str, ...]
    """Empty when the folder is sound."""


def verify_folder(folder: Path, *, decode: bool = False, progress: bool = False) -> Verification:
    """Check every byte of a folder of shards against its manifest.

    Compares the sha256 of each tar and index, walks each tar's headers and compares them with the index, parses each
    sample, and adds up samples, patients and counts. With `decode`, decodes every image too.

    Raises ShardError when there is no readable manifest; all else is returned as problems.
    """
    return verify_shards(folder, Manifest.read(folder), decode=decode, progress=progress)


def verify_shards(folder: Path, manifest: Manifest, *, decode: bool = False, progress: bool = False) -> Verification:
    """`verify_folder` with a manifest that is not in the folder, or not yet."""
    folder = Path(folder)
    problems: list[str] = []
    patients: set[str] = set()
    keys: set[str] = set()
    for shard in tqdm(manifest.shards, desc=f"verify {manifest.split}", disable=not progress):
        problems += _check_shard(folder, shard, manifest, keys, patients, decode)
    listed = {shard.name + suffix for shard in manifest.shards for suffix in (".tar", ".index")}
    strange = sorted(
        path.name for path in folder.glob("*") if path.suffix in (".tar", ".index") and path.name not in listed
    )
    problems += [f"{name} is not in the manifest" for name in strange]
    if not problems:
        problems += _check_sums(manifest, keys, patients)
    return Verification(folder, manifest, tuple(problems))


def check_against(manifest: Manifest, other: Manifest) -> None:
    """Raises SplitError when two manifests share a patient, or when their salts differ and nothing can be said."""
    if manifest.salt != other.salt:
        raise SplitError(
            f"{manifest.corpus}/{manifest.split} and {other.corpus}/{other.split} were hashed with different salts, "
            "so shared patients cannot be found: make both with one --salt-file"
        )
    shared = shared_patients(manifest, other)
    if shared:
        raise SplitError(
            f"{manifest.corpus}/{manifest.split} and {other.corpus}/{other.split} share {len(shared)} patients "
            f"(first by hash: {min(shared)}): a score on one is not held out from the other"
        )


def shared_patients(manifest: Manifest, other: Manifest) -> set[str] | None:
    """Hashes of the patients (articles, for figures) in both; None where the salts differ and nothing can be told."""
    return set(manifest.patients) & set(other.patients) if manifest.salt == other.salt else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What two folders of shards have in common."""

    name: str
    """Corpus and split."""
    other: str
    patients: set[str] | None
    """None: the salts differ, so it cannot be told."""
    images: list[SharedImage]
    """By their pixels, whatever they are called."""
    not_compared: Counter[str]
    """Images of either folder that have no perceptual hash, by reason."""


def find_overlaps(folders: Sequence[Path], others: Sequence[Path], *, progress: bool = False) -> Iterator[Overlap]:
    """Compare every folder with every other one, each image hashed once. Raises ShardError when a folder is damaged."""
    left, right = ([ShardSource(folder) for folder in part] for part in (folders, others))
    hashed, hashed_others = ([hash_images(source, progress=progress) for source in part] for part in (left, right))
    for source, images in zip(left, hashed, strict=True):
        for other, other_images in zip(right, hashed_others, strict=True):
            yield Overlap(
                name=f"{source.manifest.corpus}/{source.manifest.split}",
                other=f"{other.manifest.corpus}/{other.manifest.split}",
                patients=shared_patients(source.manifest, other.manifest),
                images=shared_images(images, other_images),
                not_compared=images.left_out + other_images.left_out,
            )


def compare_counts(manifests: Mapping[str, Manifest], expected: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Counts that differ from the data card's: name -> (found, expected). `images` counts all splits together.

    What rules and skips left out is counted as found: the manifest names it.
    """
    found = {split: manifest.planned for split, manifest in manifests.items()}
    outside = max((sum(manifest.excluded_from_corpus.values()) for manifest in manifests.values()), default=0)
    found["images"] = sum(found.values()) + outside
    return {name: (found.get(name, 0), count) for name, count in expected.items() if found.get(name, 0) != count}


def _check_shard(
    folder: Path, shard: Shard, manifest: Manifest, keys: set[str], patients: set[str], decode: bool
) -> list[str]:
    tar = folder / f"{shard.name}.tar"
    for path, expected in ((tar, shard.sha256), (tar.with_suffix(".index"), shard.index_sha256)):
        try:
            if sha256(path) != expected:
                return [f"{path.name}: its bytes are not those that were written (sha256 differs)"]
        except FileNotFoundError:
            return [f"{path.name} is missing"]
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
        expected[f"{key}.{index.suffixes[row]}"] = index.image[row]
        expected[f"{key}.json"] = index.meta[row]
    with tar.open("rb") as file:
        for member in members(file, "it"):
            place = expected.pop(member.name, None)
            if place is None or not np.array_equal(place, (member.offset, len(member.data))):
                problems.append(f"{tar.name}: member {member.name!r} is not where the index says")
            else:
                problems += _check_member(tar, member.name, member.data, manifest, patients, decode)
            if len(problems) > _MOST_PROBLEMS:
                return [*problems, f"{tar.name}: and more; the rest of it was not read"]
    problems += [f"{tar.name}: {name} is in the index and not in the tar" for name in expected]
    problems += [f"{tar.name}: key {key} stands twice" for key in index.keys if key in keys]
    keys.update(index.keys)
    if len(index.keys) != shard.samples:
        problems.append(f"{tar.name}: {len(index.keys)} samples where the manifest says {shard.samples}")
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
        return [f"{tar.name}: {name} says another key, corpus or split"]
    if not set(sample.labels) <= set(manifest.label_names):
        return [f"{tar.name}: {name} has labels that the manifest does not name"]
    return []


def _check_sums(manifest: Manifest, keys: set[str], patients: set[str]) -> list[str]:
    problems = []
    if len(keys) != manifest.samples:
        problems.append(f"{len(keys)} samples in the shards, {manifest.samples} in the manifest")
    if patients != set(manifest.patients):
        problems.append(f"{len(patients)} patients in the shards, {len(manifest.patients)} in the manifest")
    accounted = manifest.samples + sum(manifest.excluded.values()) + sum(manifest.skipped.values())
    if accounted != manifest.planned:
        problems.append(f"{manifest.planned} images were planned, {accounted} are accounted for")
    if len(manifest.skipped_keys) != sum(manifest.skipped.values()):
        problems.append("the skipped images that are listed are not those that are counted")
    return problems
