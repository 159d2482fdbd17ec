"""Uploading shards to an object store: every file is read back and compared with its hash, the
manifest comes last.

A remote folder without a manifest is not finished, so an interrupted upload is never taken for a
whole one. Run it again to resume: existing files are compared and kept.
"""

import dataclasses
import hashlib
from pathlib import Path

from tqdm import tqdm

from medvl.common.files import sha256
from medvl.data.shards.format import MANIFEST, Manifest, split_folders
from medvl.data.shards.regions import REGION_MANIFEST, REGIONS, RegionManifest, list_regions
from medvl.data.storage import store
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.errors import ConfigError, ShardError, StorageError

_THREADS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """Result of an upload."""

    address: str
    files: int
    """Files that were sent; the others were there."""
    kept: int
    bytes: int
    """Bytes of all files."""


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    path: Path
    target: RemotePath
    sha256: str


def upload_shards(folder: Path, address: str | Location, *, progress: bool = False) -> list[Upload]:
    """Upload a folder of shards, or every split in a folder of splits, with the regions beside
    them.

    Private folders are not uploaded. Returns one entry per split.

    Args:
        folder: local folder.
        address: s3://, gs://, az:// or hf:// address of the folder to write.
        progress: show a progress bar.

    Raises:
        ConfigError: the address holds other shards ("exists"), or cannot be written
            ("unsupported").
        ShardError: a local file is missing or differs from its manifest.
        StorageError: the store cannot be reached or refuses access, or holds other bytes after two
            attempts.
    """
    target = writable(address)
    splits = split_folders(folder)
    whole = [
        (Path(str(split)), target if split == folder else target / split.name) for split in splits
    ]
    for split, place in whole:
        _refuse_other(Manifest.read(split), place)
    return [_upload_split(split, place, progress) for split, place in whole]


def writable(address: str | Location) -> RemotePath:
    """Return an address that shards can be uploaded to. Raises ConfigError."""
    target = locate(address)
    if not isinstance(target, RemotePath) or not target.can_write:
        message = (
            f"expected an address that can be written (s3://, gs://, az://, hf://), got {target}"
        )
        raise ConfigError(message, "unsupported", field="address")
    return target


def _refuse_other(manifest: Manifest, target: RemotePath) -> None:
    if not (target / MANIFEST).is_file():
        return
    if Manifest.read(target) != manifest:
        message = f"{target} holds other shards; give another address, or remove it"
        raise ConfigError(message, "exists", field="address")


def _upload_split(folder: Path, target: RemotePath, progress: bool) -> Upload:
    manifest = Manifest.read(folder)
    files = [
        _File(folder / (shard.name + suffix), target / (shard.name + suffix), digest)
        for shard in manifest.shards
        for suffix, digest in ((".tar", shard.sha256), (".index", shard.index_sha256))
    ]
    last = [folder / MANIFEST]
    for name in list_regions(folder):
        regions = folder / REGIONS / name
        place = target / REGIONS / name
        files += [
            _File(regions / (shard.name + suffix), place / (shard.name + suffix), digest)
            for shard in RegionManifest.read(regions).shards
            for suffix, digest in ((".tar", shard.sha256), (".index", shard.index_sha256))
        ]
        last.insert(0, regions / REGION_MANIFEST)
    sizes = target.sizes()
    sent = 0
    results = store.map_threads(lambda file: _send(file, sizes, target), files, _THREADS)
    for was_sent in tqdm(
        results, f"upload {manifest.split}", len(files), unit="file", disable=not progress
    ):
        sent += was_sent
    for path in last:  # manifests come after all they list
        place = RemotePath(f"{target}/{path.relative_to(folder).as_posix()}")
        sent += _send(_File(path, place, sha256(path)), sizes, target)
    total = sum(path.stat().st_size for path in [*(file.path for file in files), *last])
    return Upload(str(target), sent, len(files) + len(last) - sent, total)


def _send(file: _File, existing: dict[str, int], root: RemotePath) -> bool:
    """Make the remote file equal to the local one. Returns whether it was sent."""
    try:
        size = file.path.stat().st_size
    except FileNotFoundError:
        raise ShardError(
            f"{file.path} does not exist; copy it, or convert the corpus again", "not_found"
        ) from None
    if (
        existing.get(str(file.target).removeprefix(f"{root}/")) == size
        and _remote_sha256(file, size) == file.sha256
    ):
        return False
    for _ in range(2):
        store.write(str(file.target), file.path)
        if _remote_sha256(file, size) == file.sha256:
            return True
    if sha256(file.path) != file.sha256:
        raise ShardError(
            f"{file.path} differs from its manifest; run `medvl verify {file.path.parent}`",
            "mismatch",
        )
    message = (
        f"{file.target} has other bytes than were sent, twice; check the store, and run "
        f"the same command again"
    )
    raise StorageError(message, "mismatch")


def _remote_sha256(file: _File, size: int) -> str:
    """Return the hash of the content in the store; "" if there is no such file."""
    content = hashlib.sha256()
    try:
        for block in store.stream(str(file.target), size, threads=1):
            content.update(block)
    except FileNotFoundError:
        return ""
    return content.hexdigest()
