"""Atomic writes, hashes and locks."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from medvl.errors import ConfigError, MedvlError, TrainingError


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file the permissions of a newly created file; those of safetensors are readable by
    their owner only.
    """
    probe = temporary_name(path)
    with (
        contextlib.suppress(OSError),  # some network file systems have no permissions to change
        os.fdopen(_create(probe, 0o666)) as new,
        os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file,
    ):
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(new.fileno()).st_mode))
    probe.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path, *, permissions: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that is flushed and renamed to `path` on success, and removed on an error.

    The temporary name is random, and the file is created exclusively: a link that somebody has put
    into the folder is never followed. A link under the name `path` itself is replaced; the file
    that it points to keeps its content.

    Args:
        path: final name.
        permissions: mode of the file before the umask; 0o600 for files that only their owner may
            read.
        durable: wait until the disk has the content. Without it, a crash of the machine can leave
            an empty file.
    """
    temporary = temporary_name(path)
    with os.fdopen(_create(temporary, permissions), "w+b") as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a library that writes a file by its name; then act as
    `new_file` does.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        follow_umask(temporary)
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(
    path: Path, content: str | bytes, *, permissions: int = 0o666, durable: bool = True
) -> Path:
    """Write a file by `new_file`, so that it is never partial and no link is followed; return
    its path.
    """
    with new_file(path, permissions=permissions, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def open_own(path: Path, *, permissions: int = 0o666, buffering: int = -1) -> BinaryIO:
    """Open a file to read and append, created if it does not exist.

    Raises ConfigError where the name is a link, a second name of another file (a hard link), or no
    regular file: writing would change something outside of the folder.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, permissions)
    except OSError as error:
        # The two that O_NOFOLLOW gives for a link, a folder, and a pipe or device without a reader.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise _not_own(path) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _not_own(path)
    return os.fdopen(descriptor, "a+b", buffering)


def _not_own(path: Path) -> ConfigError:
    advice = "remove it, or name another folder"
    return ConfigError(f"{path} is a link, or no regular file; {advice}", "not_a_file")


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that nobody can guess; `medvl.common.files.sweep` removes
    files of such names.
    """
    # The start of the name says what the file is; a long one with the addition could be over the
    # limit of 255 bytes.
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.partial")


def _create(path: Path, permissions: int) -> int:
    return os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, permissions
    )


# Atomic folders and links, and a lock on a folder.

_locked_here: set[Path] = set()
"""Folders locked by this process: record locks do not exclude a second lock of the same process."""


def fsync_tree(folder: Path) -> None:
    """Flush all files and folders below a folder, and the folder itself, to the disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def write_json(path: Path, value: Any) -> None:
    """Write and flush a JSON file. Raises ValueError on NaN and infinity."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and removed on an error.

    A killed process leaves at most a folder whose name begins with a dot. An existing folder is
    replaced; it is absent between two renames only. A link under either name is removed, and what
    it points to stays as it is.
    """
    aside = path.with_name(f".{path.name}.new")
    _remove(aside)
    aside.mkdir(parents=True)  # fails where somebody makes another entry meanwhile
    try:
        yield aside
        for weights in aside.rglob("*.safetensors"):
            follow_umask(weights)
        fsync_tree(aside)
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            discard(path)
        aside.replace(path)
        wait_for(path)
        fsync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Wait until a path exists: network file systems may show a new name some seconds late.

    Raises FileNotFoundError after `seconds`.
    """
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(
                errno.ENOENT, f"not seen for {seconds:.0f} s after it was written", str(path)
            )
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # makes the client query the server again


def discard(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that it is never partial under its name."""
    trash = folder.with_name(f".{folder.name}.trash")
    _remove(trash)
    folder.replace(trash)
    if trash.is_symlink():
        trash.unlink()
        return
    wait_for(trash)
    shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Remove what killed processes have left of `new_folder`, `new_file` and `discard`.

    The caller holds the lock of the folder. Failures are left for the next sweep.
    """
    for pattern in (".*.new", ".*.trash", ".*.partial"):
        for leftover in folder.glob(pattern):
            _remove(leftover)


def refuse_links(folder: Path, *names: str) -> None:
    """Raise ConfigError where one of these entries of a folder is a link.

    The folder itself may be one: its user chose it. A link inside it may have come with a run that
    somebody else made, and writing would change files elsewhere.
    """
    for name in names:
        if (folder / name).is_symlink():
            message = f"{folder / name} is a link, and writing would change another folder"
            raise ConfigError(f"{message}; remove it, or name another folder", "outside_folder")


def subfolder(folder: Path, *names: str) -> Path:
    """Return the folder of these names, one below the other, created if it does not exist; see
    `refuse_links`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        refuse_links(folder, name)
        folder = folder / name
        folder.mkdir(exist_ok=True)
    return folder


def private_folder(path: Path) -> Path:
    """Return a folder that only this user can read and write, created if it does not exist.

    An existing folder of this user gets the mode 0700. Raises ConfigError where it is a link,
    belongs to another user, or lies on a file system without permissions.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_links(path.parent, path.name)
    status = path.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
        status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        reason = (
            "belongs to another user"
            if status.st_uid != os.geteuid()
            else "cannot be closed to other users"
        )
        message = (
            f"{path} {reason}, and private files go into it; name a folder of yours, on a "
            f"disk with permissions"
        )
        raise ConfigError(message, "denied")
    return path


def _remove(path: Path) -> None:
    """Remove a folder with its content, or a file or link; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def point(link: Path, folder: Path) -> None:
    """Make `link` a relative symbolic link to a folder, atomically.

    On a file system without symbolic links it becomes a folder with hard links to (or copies of)
    the same files.
    """
    target = os.path.relpath(folder, link.parent)
    if link.is_symlink() and str(link.readlink()) == target:
        return
    aside = link.with_name(f".{link.name}.new")
    _remove(aside)
    try:
        aside.symlink_to(target, target_is_directory=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        with new_folder(link) as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True, copy_function=_link_or_copy)
        return
    if link.is_dir() and not link.is_symlink():
        discard(link)
    aside.replace(link)
    fsync(link.parent)


class RunLock:
    """Lock that excludes a second process from a folder while this one writes it.

    Args:
        folder: the folder, created if it does not exist.
        error: type of the error where the folder is locked.
        field: setting that names the folder, for the error.

    It is a record lock of the operating system on `.lock`. It is released when the process ends,
    however that happens, and child processes (the loader's workers) do not inherit it, so a lock is
    never stale.
    """

    def __init__(
        self, folder: Path, *, error: type[MedvlError] = TrainingError, field: str = "run_dir"
    ) -> None:
        self._path = folder.resolve() / ".lock"
        self._error = error
        self._field = field

    def __enter__(self) -> Self:
        """Lock the folder. Raises `error` where another process holds the lock, ConfigError
        where `.lock` is a link.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path in _locked_here:
            raise self._in_use("this process")
        self._file = open_own(self._path)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip() or "another process"
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                message = (
                    f"cannot lock {self._path} ({error.strerror}); use a file system with locks"
                )
                raise self._error(message, "unreadable", field=self._field) from error
            raise self._in_use(owner) from None
        _locked_here.add(self._path)
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            self._file.flush()
        except BaseException:  # a full disk, or Ctrl-C: the folder stays free
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _locked_here.discard(self._path)
        self._file.close()

    def _in_use(self, owner: str) -> MedvlError:
        message = (
            f"{self._path.parent} is in use by {owner}; wait for it, or choose another "
            f"{self._field}"
        )
        return self._error(message, "in_use", field=self._field)


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
