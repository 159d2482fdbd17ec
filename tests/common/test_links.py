"""Writing beside links that somebody else has put into a folder: no file outside of it changes."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common import files, files as folders
from medvl.common.files import (
    RunLock,
    discard,
    new_file,
    new_folder,
    new_path,
    open_own,
    point,
    subfolder,
    sweep,
    write_atomic,
)
from medvl.errors import ConfigError

NOTES = b"notes of the user"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Return a file of the user, outside of the folder that is written."""
    path = tmp_path / "notes.txt"
    path.write_bytes(NOTES)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic": lambda link, target: link.symlink_to(target),
    "hard": lambda link, target: link.hardlink_to(target),
    "of a link": lambda link, target: (
        link.with_name("first").symlink_to(target),
        link.symlink_to("first"),
    )[0],
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_lock_that_is_a_link_is_refused(kind: str, run: Path, notes: Path) -> None:
    LINKS[kind](run / ".lock", notes)
    with raises(ConfigError, "not_a_file", names=".lock"), RunLock(run):
        pass
    assert notes.read_bytes() == NOTES


@pytest.mark.parametrize("kind", LINKS)
def test_appending_to_a_link_is_refused(kind: str, run: Path, notes: Path) -> None:
    LINKS[kind](run / "metrics.jsonl", notes)
    with raises(ConfigError, "not_a_file", names="metrics.jsonl"):
        open_own(run / "metrics.jsonl")
    assert notes.read_bytes() == NOTES


def test_appending_to_a_pipe_or_folder_is_refused_at_once(run: Path) -> None:
    os.mkfifo(run / "log.txt")
    (run / "folder").mkdir()
    for name in ("log.txt", "folder"):
        with raises(ConfigError, "not_a_file", names=name):
            open_own(run / name)


def test_a_dangling_link_makes_no_file(run: Path, tmp_path: Path) -> None:
    (run / "log.txt").symlink_to(tmp_path / "absent")
    with raises(ConfigError, "not_a_file"):
        open_own(run / "log.txt")
    write_atomic(run / "log.txt", "new")
    assert not (tmp_path / "absent").exists()
    assert not (run / "log.txt").is_symlink()


def test_appending_keeps_what_is_there(run: Path) -> None:
    for line in (b"1\n", b"2\n"):
        with open_own(run / "log.txt") as file:
            file.write(line)
    assert (run / "log.txt").read_bytes() == b"1\n2\n"


@pytest.mark.parametrize("kind", LINKS)
def test_writing_replaces_a_link_and_keeps_its_target(kind: str, run: Path, notes: Path) -> None:
    LINKS[kind](run / "results.json", notes)
    write_atomic(run / "results.json", "{}")
    assert (run / "results.json").read_text() == "{}"
    assert not (run / "results.json").is_symlink()
    assert notes.read_bytes() == NOTES


def test_temporary_names_are_random_and_created_exclusively(
    run: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        ".results.json.partial",
        ".results.json.mode",
        "results.json.partial",
    ):  # names of earlier versions
        (run / name).symlink_to(notes)
    write_atomic(run / "results.json", "{}")
    with new_path(run / "weights") as path:
        path.write_text("w")
    assert notes.read_bytes() == NOTES
    monkeypatch.setattr(
        files.secrets, "token_hex", lambda size: "guessed"
    )  # even a guess is not followed
    (run / ".results.json.guessed.partial").symlink_to(notes)
    with pytest.raises(FileExistsError):
        write_atomic(run / "results.json", "[]")
    assert notes.read_bytes() == NOTES
    assert (run / "results.json").read_text() == "{}"


def test_a_failed_write_leaves_the_old_file_alone(run: Path) -> None:
    write_atomic(run / "a", "old")

    def interrupted(*, by_name: bool) -> None:
        with new_path(run / "a") if by_name else new_file(run / "a") as file:
            file.write_text("half") if isinstance(file, Path) else file.write(b"half")
            raise KeyError

    for by_name in (True, False):
        with pytest.raises(KeyError):
            interrupted(by_name=by_name)
    assert {path.name: path.read_text() for path in run.iterdir()} == {"a": "old"}


def test_permissions_are_those_of_new_files_or_the_owners_alone(run: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_atomic(run / "open", "")
        write_atomic(run / "private", "", permissions=0o600)
        with new_path(run / "named") as path:
            path.touch(mode=0o600)
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.iterdir()}
    assert modes == {"open": 0o640, "private": 0o600, "named": 0o640}


def test_names_at_the_limit_of_the_file_system_are_written(run: Path) -> None:
    name = "é" * 125 + ".json"  # 255 bytes
    write_atomic(run / name, "{}")
    assert (run / name).read_text() == "{}"


def test_new_folders_replace_links_and_keep_their_targets(run: Path, notes: Path) -> None:
    photos = notes.parent / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_bytes(NOTES)
    for name in ("step-1", ".step-1.new", ".step-1.trash"):
        (run / name).symlink_to(photos)
    with new_folder(run / "step-1") as folder:
        (folder / "a").touch()
    with new_folder(run / "step-1") as folder:  # discards the first one
        (folder / "b").touch()
    assert [path.name for path in (run / "step-1").iterdir()] == ["b"]
    (run / "step-2").symlink_to(photos)
    discard(run / "step-2")
    (run / "best").symlink_to(photos)
    point(run / "best", run / "step-1")
    (run / ".x.partial").symlink_to(photos)
    sweep(run)
    assert sorted(path.name for path in run.iterdir()) == ["best", "step-1"]
    assert (photos / "one.jpg").read_bytes() == NOTES


def test_folders_below_the_named_one_are_no_links(run: Path, notes: Path) -> None:
    (run / "checkpoints").symlink_to(notes.parent)
    with raises(ConfigError, "outside_folder", names="checkpoints"):
        subfolder(run, "checkpoints", "a")
    linked = notes.parent / "linked"
    linked.symlink_to(run)  # the user's own choice
    assert subfolder(linked, "eval", "retrieval").is_dir()


def test_partial_files_of_killed_processes_are_swept(run: Path) -> None:
    files.temporary_name(run / "shard-000000.tar").touch()
    (run / "kept.partial").touch()
    folders.sweep(run)
    assert [path.name for path in run.iterdir()] == ["kept.partial"]


def test_private_folders_are_closed_to_others(run: Path) -> None:
    run.chmod(0o777)
    assert stat.S_IMODE(folders.private_folder(run).stat().st_mode) == 0o700
    made = folders.private_folder(run / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (run / "link").symlink_to(made)
    with raises(ConfigError, "outside_folder", names="link"):
        folders.private_folder(run / "link")


def test_private_folders_of_others_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: run.stat().st_uid + 1)
    with raises(ConfigError, "denied", names=str(run)):
        folders.private_folder(run)
