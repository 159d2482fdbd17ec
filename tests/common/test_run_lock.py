"""Locks of folders whose lock file cannot be written, and locks within one process."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common import files
from medvl.common.files import RunLock
from medvl.errors import TrainingError

FULL = """
import pathlib, resource, sys
from medvl.common.files import RunLock
folder = pathlib.Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # every write fails, as on a full disk
try:
    RunLock(folder).__enter__()
except OSError as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()  # the process that failed is still there
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
with RunLock(folder):
    print((folder / ".lock").read_text().split()[0], flush=True)
"""


def test_lock_file_that_cannot_be_written_leaves_the_folder_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "OSError\n"
        with RunLock(tmp_path):  # for another process
            pass
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "process\n"  # and for the same one


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space")])
def test_interrupted_lock_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(self: "File", content: object) -> int:
        raise error

    class File(io.FileIO):
        write = fail

    opened: list[File] = []

    def open_file(path: Path) -> File:
        opened.append(File(path, "a+"))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_own", open_file)
        with pytest.raises(type(error)):
            RunLock(tmp_path).__enter__()
    assert [file.closed for file in opened] == [True]
    with RunLock(tmp_path):
        pass


def test_lock_excludes_the_same_process_until_it_is_left(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with RunLock(tmp_path):
        for name in (tmp_path, tmp_path / "link"):
            with raises(TrainingError, "in_use", "run_dir", names="this process"), RunLock(name):
                pass
    with RunLock(tmp_path / "link"):
        pass
