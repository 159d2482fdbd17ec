"""Verification of a folder of shards against its manifest, and search for patients and images
shared by two folders.
"""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from medvl.common.files import sha256
from medvl.data.images.codecs import decode_image
from medvl.data.shards.format import (
    IMAGE_SUFFIXES,
    NO_IMAGE,
    ORGAN_SUFFIX,
    REGION_SUFFIX,
    VOLUME_SUFFIX,
    Index,
    Manifest,
    Shard,
    read_members,
    sample_from_json,
)
from medvl.data.shards.regions import REGIONS, RegionManifest, Regions, RegionShard, read_index
from medvl.data.shards.source import ShardSource
from medvl.data.storage.location import Location, local_copy, locate
from medvl.data.volumes.codec import decode_volume, read_volume_header
from medvl.errors import ImageError, ShardError, SplitError, VolumeError
from medvl.schema import ORGANS

# Verification of the regions of a folder of shards against their manifests.


@dataclasses.dataclass(frozen=True, slots=True)
class RegionVerification:
    """Result of verifying one folder of regions."""

    name: str
    manifest: RegionManifest | None
    problems: tuple[str, ...]
    """Empty when the folder is intact."""


def verify_regions(folder: Location, manifest: Manifest) -> list[RegionVerification]:
    """Check every byte of the regions of a folder of shards: hashes, members, indexes, form, and
    the shards' hashes.
    """
    folders = [path for path in (folder / REGIONS).glob("*") if path.is_dir()]
    return [_verify(path, manifest) for path in sorted(folders, key=str)]


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
                problems += _check_region_shard(local, shard, manifest)
        except ShardError as error:
            problems.append(f"{shard.name}.tar: {error}")
    problems += unlisted_files(folder, manifest.shards)
    return RegionVerification(folder.name, manifest, tuple(problems))


def unlisted_files(folder: Location, shards: Sequence[Shard | RegionShard]) -> list[str]:
    """Return a problem for each tar and index of a folder that is not in its manifest."""
    names = {path.name for path in folder.glob("*") if path.suffix in (".tar", ".index")}
    expected = {shard.name + suffix for shard in shards for suffix in (".tar", ".index")}
    return [f"{name} is not in the manifest" for name in sorted(names - expected)]


def check_hashes(tar: Path, shard: Shard | RegionShard) -> list[str]:
    """Return a problem where a tar or its index is missing or not the one of the manifest."""
    for path, expected in ((tar, shard.sha256), (tar.with_suffix(".index"), shard.index_sha256)):
        try:
            if sha256(path) != expected:
                return [f"{path.name}: sha256 differs from the manifest"]
        except FileNotFoundError:
            return [f"{path.name} is missing"]
    return []


def _check_region_shard(folder: Path, shard: RegionShard, manifest: RegionManifest) -> list[str]:
    tar = folder / f"{shard.name}.tar"
    if difference := check_hashes(tar, shard):
        return difference
    keys, place_N2 = read_index(tar.with_suffix(".index"))
    rows = {
        f"{key}.{REGION_SUFFIX}": place_N2[row] for row, key in enumerate(keys) if place_N2[row, 1]
    }
    images = len(rows)
    regions = 0
    problems = []
    with tar.open("rb") as file:
        for member in read_members(file, "the tar"):
            place = rows.pop(member.name, None)
            if place is None or not np.array_equal(place, (member.offset, len(member.data))):
                problems.append(f"{tar.name}: member {member.name!r} does not match the index")
                continue
            try:
                content = Regions.from_bytes(member.data, manifest.width, len(manifest.class_names))
            except ValueError as error:
                problems.append(f"{tar.name}: {member.name}: {error}")
                continue
            regions += len(content.boxes_P4)
            if not np.isfinite(content.features_PD).all():
                problems.append(f"{tar.name}: {member.name}: a feature is not finite")
    problems += [f"{tar.name}: {name} is in the index but not in the tar" for name in rows]
    if not problems and (len(keys), images, regions) != (
        shard.samples,
        shard.images,
        shard.regions,
    ):
        problems.append(
            f"{tar.name}: {len(keys)} samples, {images} images, {regions} regions differ from "
            f"the manifest"
        )
    return problems


# Images shared by two folders of shards, found by perceptual hash.
#
# An image is hashed by the signs of its low frequencies (C. Zauner, Implementation and
# Benchmarking of Perceptual Image Hash Functions, 2010), with 255 bits instead of the usual 64,
# which are too few to tell radiographs and slices apart. The whole image and its largest bright
# region are hashed, because copies are often cropped of their margins and of the writing in them.
#
# Measured on 2,050 CT and MR slices, 1,562 chest radiographs and the 314 images of VQA-RAD, at a
# limit of `SAME` bits: 1,204 of 1,205 copies at half their size in JPEG of quality 50 are found,
# 97 percent of those with a gamma of 1.3, 81 percent of those with a black margin, and all 19
# slices that are known to be in VQA-RAD, two of them cropped there. Of 7 million pairs of images
# of different cases, the matches were the same image on inspection. Neighbouring slices of one
# scan sometimes match; they must not be in two splits either. A copy that is cropped within the
# body, written on, flipped or rotated is usually missed.

SAME = 16
"""Maximum number of differing bits, of 255, for two images to count as the same."""

_SIDE = 64
_FREQUENCIES = 16
# size for the search of the bright region; thinner strokes are writing
_REGION_SIDE = 256
_DARK = 24
_BRUSH = 5
_BLOCK = 4096


def perceptual_hash(image_HW: np.ndarray) -> np.ndarray | None:
    """Return the hashes of a uint8 image and of its largest bright region, bool (2, 255); None if
    it is uniform.

    The image is averaged down to 64 x 64 pixels. A bit is set if one of the 16 x 16 lowest
    frequencies of its cosine transform (without the mean) is above their median. Size, aspect
    ratio, compression, brightness and contrast hardly change the hash.
    """
    whole = _signs(image_HW)
    region = _signs(_bright_region(image_HW))
    return None if whole is None or region is None else np.stack([whole, region])


@dataclasses.dataclass(frozen=True, slots=True)
class HashedImages:
    """Hashes of the images of a folder of shards."""

    keys: tuple[str, ...]
    bits_N2K: np.ndarray
    not_hashed: Counter[str]
    """Images without a hash, by reason: unreadable, or of one colour."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedImage:
    """Keys of two images that are the same."""

    key: str
    other: str
    distance: int
    """Number of differing bits, of 255, between the closer pair of hashes."""


def hash_images(source: ShardSource, *, progress: bool = False) -> HashedImages:
    """Hash every image of a folder on all cores. Raises ShardError when a shard is damaged."""
    keys = []
    hashes = []
    not_hashed = Counter[str]()
    # decoding, resizing and the transform release the GIL
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = pool.map(lambda position: _hash_one(source, position), range(len(source)))
        for position, result in enumerate(
            tqdm(results, "hash", len(source), unit="img", disable=not progress)
        ):
            if isinstance(result, str):
                not_hashed[result] += 1
            else:
                keys.append(source.key(position))
                hashes.append(result)
    bits_N2K = np.stack(hashes) if hashes else np.zeros((0, 2, _FREQUENCIES**2 - 1), bool)
    return HashedImages(tuple(keys), bits_N2K, not_hashed)


def shared_images(
    images: HashedImages, others: HashedImages, *, limit: int = SAME
) -> list[SharedImage]:
    """Return all pairs whose hashes differ in at most `limit` bits, closest first."""
    pairs = [
        SharedImage(images.keys[row], others.keys[column], distance)
        for row, column, distance in _close_pairs(images.bits_N2K, others.bits_N2K, limit)
    ]
    return sorted(pairs, key=lambda pair: (pair.distance, pair.key, pair.other))


def _hash_one(source: ShardSource, position: int) -> np.ndarray | str:
    try:
        bits = perceptual_hash(source.pixels(position, color=False))
    except ImageError as error:
        return error.code
    return "of_one_colour" if bits is None else bits


def _signs(image_HW: np.ndarray) -> np.ndarray | None:
    small_HW = cv2.resize(image_HW, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    if np.ptp(small_HW) < 2:
        return None  # the signs would be rounding errors
    lowest = cv2.dct(small_HW)[:_FREQUENCIES, :_FREQUENCIES].ravel()[1:]
    return lowest > np.median(lowest)


def _bright_region(image_HW: np.ndarray) -> np.ndarray:
    """Return `image_HW` cropped to its largest connected region that is not nearly black."""
    scale = _REGION_SIDE / max(image_HW.shape)
    shape = [max(1, round(side * scale)) for side in image_HW.shape]
    small_HW = cv2.resize(image_HW, (shape[1], shape[0]), interpolation=cv2.INTER_AREA)
    bright_HW = (small_HW > _DARK).astype(np.uint8)
    thick_HW = cv2.morphologyEx(bright_HW, cv2.MORPH_OPEN, np.ones((_BRUSH, _BRUSH), np.uint8))
    count, _, boxes, _ = cv2.connectedComponentsWithStats(thick_HW)
    if count < 2:  # only the background
        return image_HW
    largest = 1 + int(boxes[1:, cv2.CC_STAT_AREA].argmax())
    x, y, width, height = boxes[largest, :4] / scale
    return image_HW[int(y) : int(np.ceil(y + height)), int(x) : int(np.ceil(x + width))]


def _close_pairs(
    bits_N2K: np.ndarray, other_M2K: np.ndarray, limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (n, m, distance) of close pairs; Hamming distances from products of sign matrices
    are exact and fast.
    """
    length = bits_N2K.shape[2]
    for start in range(0, len(bits_N2K), _BLOCK):
        signs_2NK = _as_signs(bits_N2K[start : start + _BLOCK])
        for other_start in range(0, len(other_M2K), _BLOCK):
            other_2KM = _as_signs(other_M2K[other_start : other_start + _BLOCK]).transpose(0, 2, 1)
            distance_NM = (length - (signs_2NK @ other_2KM).max(axis=0)) / 2
            for row, column in zip(*np.nonzero(distance_NM <= limit), strict=True):
                yield start + int(row), other_start + int(column), int(distance_NM[row, column])


def _as_signs(bits_N2K: np.ndarray) -> np.ndarray:
    """Return float32 (2, N, K) of 1 and -1."""
    return (2 * bits_N2K.astype(np.float32) - 1).transpose(1, 0, 2)


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


def verify_folder(
    folder: str | Location, *, decode: bool = False, progress: bool = False
) -> Verification:
    """Check every byte of a folder of shards, or of a remote one, against its manifest.

    Compares the sha256 of each tar and index, compares the members of each tar with its index,
    parses each sample, and compares the numbers of samples, patients and planned images; likewise
    for the folder's regions. With `decode`, decodes every image too.

    Remote shards are downloaded one after another; the cache is not used.

    Raises ShardError when there is no readable manifest, StorageError when a store cannot be
    reached; everything else is returned as a problem.
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
    """Raise SplitError when two manifests share a patient, or cannot be compared because their
    salts differ.

    Synthetic images count as the training data of their generators; where that has another salt, it
    is not compared.
    """
    pair = f"{manifest.corpus}/{manifest.split} and {other.corpus}/{other.split}"
    if manifest.salt != other.salt:
        message = f"{pair} were hashed with different salts; convert both with one --salt-file"
        raise SplitError(message, "mismatch", field="salt")
    shared = shared_patients(manifest, other)
    if shared:
        patients = f"{len(shared)} patients (first by hash: {min(shared)})"
        raise SplitError(
            f"{pair} share {patients}; a score on one is not held out from the other", "leak"
        )
    for ancestor in itertools.islice(manifest.lineage(), 1, None):
        if ancestor.salt == other.salt:
            check_against(ancestor, other)


def shared_patients(manifest: Manifest, other: Manifest) -> set[str] | None:
    """Return the hashed patients (articles, for figures) in both manifests; None if their salts
    differ.
    """
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
    """Compare each of `folders` with each of `others`; every image is hashed once. Raises
    ShardError.
    """
    left, right = ([ShardSource(folder) for folder in part] for part in (folders, others))
    hashed, hashed_others = (
        [hash_images(source, progress=progress) for source in part] for part in (left, right)
    )
    for source, images in zip(left, hashed, strict=True):
        for other, other_images in zip(right, hashed_others, strict=True):
            yield Overlap(
                name=f"{source.manifest.corpus}/{source.manifest.split}",
                other=f"{other.manifest.corpus}/{other.manifest.split}",
                patients=shared_patients(source.manifest, other.manifest),
                images=shared_images(images, other_images),
                not_compared=images.not_hashed + other_images.not_hashed,
            )


def compare_counts(
    manifests: Mapping[str, Manifest], expected: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return the counts that differ from the data card's: name -> (actual, expected).

    `images` is the total over all splits. Excluded and skipped images count as present: the
    manifest lists them. `rows` are those that the conversion read, where they are not images.
    """
    actual = {split: manifest.planned for split, manifest in manifests.items()}
    actual["images"] = sum(actual.values()) + max(
        map(_images_left_out, manifests.values()), default=0
    )
    actual["rows"] = max((int(each.rows.get("read", 0)) for each in manifests.values()), default=0)
    return {
        name: (actual.get(name, 0), count)
        for name, count in expected.items()
        if actual.get(name, 0) != count
    }


def _images_left_out(manifest: Manifest) -> int:
    """Return the images of the corpus that were left out before conversion; none where it counts
    other rows.
    """
    if manifest.rows.get("unit", "images") != "images":
        return 0
    left_out = Counter(manifest.excluded_from_corpus) + Counter(manifest.rows.get("skipped", {}))
    return sum(count for reason, count in left_out.items() if reason not in _REPEATS)


def _check_shard(
    folder: Path, shard: Shard, manifest: Manifest, keys: set[str], patients: set[str], decode: bool
) -> list[str]:
    tar = folder / f"{shard.name}.tar"
    if difference := check_hashes(tar, shard):
        return difference
    try:
        index = Index.read(tar.with_suffix(".index"))
        return _check_members(tar, index, shard, manifest, keys, patients, decode)
    except ShardError as error:
        return [f"{tar.name}: {error}"]


def _check_members(
    tar: Path,
    index: Index,
    shard: Shard,
    manifest: Manifest,
    keys: set[str],
    patients: set[str],
    decode: bool,
) -> list[str]:
    problems = []
    expected = {}
    for row, key in enumerate(index.keys):
        if index.suffixes[row] != NO_IMAGE:
            expected[f"{key}.{index.suffixes[row]}"] = index.image[row]
        if row in index.organs:
            expected[f"{key}.{ORGAN_SUFFIX}"] = np.array(index.organs[row])
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


def _check_member(
    tar: Path, name: str, data: bytes, manifest: Manifest, patients: set[str], decode: bool
) -> list[str]:
    key, _, suffix = name.rpartition(".")
    if suffix in IMAGE_SUFFIXES:
        if decode:
            try:
                decode_image(data)
            except ImageError as error:
                return [f"{tar.name}: {name}: {error}"]
        return []
    if suffix in (VOLUME_SUFFIX, ORGAN_SUFFIX):
        try:
            header = read_volume_header(data)
            if suffix == ORGAN_SUFFIX and header.dtype != np.uint8:
                raise VolumeError("expected organs of 8 bits", "malformed")
            if decode:
                values_DHW = decode_volume(data)
                if suffix == ORGAN_SUFFIX and values_DHW.max() > len(ORGANS):
                    raise VolumeError(
                        f"expected organs from 0 to {len(ORGANS)}, got {values_DHW.max()}",
                        "out_of_range",
                    )
        except VolumeError as error:
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
        problems.append(
            f"{len(patients)} patients in the shards, {len(manifest.patients)} in the manifest"
        )
    accounted = manifest.samples + sum(manifest.excluded.values()) + sum(manifest.skipped.values())
    if accounted != manifest.planned:
        problems.append(f"{manifest.planned} images were planned, {accounted} are accounted for")
    if len(manifest.skipped_keys) != sum(manifest.skipped.values()):
        problems.append("the number of listed skipped images differs from their count")
    return problems
