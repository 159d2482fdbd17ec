"""Files that survive a kill, a full disk and a second run: write aside, flush, rename; and a lock on a run's folder."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from medvl.common.files import fsync
from medvl.errors import TrainingError

_locked_here: set[Path] = set()
"""Record locks do not hold against another run of the same process, so those are kept here."""


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder in a folder, and the folder itself."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON, flushed. Raises ValueError on NaN and infinity: JSON has none."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    fsync(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `path` when the context ends well and is discarded when it does not.

    Whoever is killed leaves at most a folder with a name that begins with a dot. An older folder of that name is
    replaced: it is out of the way for the time between two renames, and what stands there afterwards is whole.
    """
    aside = path.with_name(f".{path.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        fsync_tree(aside)
        if path.exists():
            discard(path)
        aside.replace(path)
        wait_for(path)
        fsync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Return once a path is seen. A network file system may show a new name, or one of another machine, some seconds
    late; what asks for it by its name meanwhile would take it for missing.

    Raises FileNotFoundError after `seconds`.
    """
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(errno.ENOENT, f"not seen for {seconds:.0f} s after it was written", str(path))
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # makes the client ask the server again


def discard(folder: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name."""
    trash = folder.with_name(f".{folder.name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    folder.replace(trash)
    wait_for(trash)
    shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Remove what killed runs left of `new_folder` and `discard`; what cannot be removed stays for the next sweep."""
    for pattern in (".*.new", ".*.trash"):
        for leftover in folder.glob(pattern):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def point(link: Path, folder: Path) -> None:
    """Make `link` a name for a folder, at once: a relative symbolic link.

    On a file system without symbolic links it becomes a folder with hard links to (or copies of) the same files.
    """
    target = os.path.relpath(folder, link.parent)
    if link.is_symlink() and str(link.readlink()) == target:
        return
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
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
    """Keeps a second run out of a run's folder for as long as this process lives.

    A record lock of the system on `.lock`: it goes with the process, however that ends, and its children (the loader's
    workers) do not inherit it. So a lock is never stale, and a run that was killed can be started again at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir.resolve() / ".lock"

    def __enter__(self) -> Self:
        """Raises TrainingError when another run holds the folder."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path in _locked_here:
            raise TrainingError(self._refusal("this process"))
        self._file = self._path.open("a+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise TrainingError(
                    f"{self._path} cannot be locked ({error.strerror}): use a run_dir on a file system with locks"
                ) from error
            raise TrainingError(self._refusal(owner)) from None
        _locked_here.add(self._path)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _locked_here.discard(self._path)
        self._file.close()

    def _refusal(self, owner: str) -> str:
        return f"{self._path.parent} is in use by {owner}: wait for it, or choose another run_dir"


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
