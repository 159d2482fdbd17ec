"""The cache of remote files: bounded, verified, shared by processes."""

import hashlib
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.storage import cache as cache_module
from medvl.data.storage.cache import Cache, parse_bytes
from medvl.errors import ConfigError, StorageError

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def name(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


def add(cache: Cache, number: int) -> Path | None:
    return cache.add(name(number), SIZE, lambda: [content(number)], name=f"file {number}")


def held(cache: Cache) -> list[int]:
    return [number for number in range(20) if (cache.folder / name(number)).exists()]


def age(cache: Cache, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache.folder / "verified" / name(number), (then, then))


def test_least_recently_used_files_make_room(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 3 * SIZE)
    for number in range(3):
        path = add(cache, number)
        assert path is not None
        assert path.read_bytes() == content(number)
        age(cache, number, 1000 - number)
    assert Cache(cache.folder, cache.limit).find(name(0)) is not None  # used again
    assert add(cache, 3) is not None
    assert held(cache) == [0, 2, 3]
    assert cache.use().bytes == 3 * SIZE
    assert add(cache, 4) is not None
    assert held(cache) == [0, 3, 4]
    assert add(cache, 5) is None  # the others were used within the last minute
    assert held(cache) == [0, 3, 4]
    assert (
        Cache(tmp_path / "small", SIZE - 1).add(name(1), SIZE, lambda: [content(1)], name="x")
        is None
    )


@pytest.mark.parametrize("blocks", [[content(2)], [content(1)[:-1]], [content(1), b"x"], []])
def test_other_bytes_never_enter(tmp_path: Path, blocks: list[bytes]) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    with raises(StorageError, "mismatch", names="s3://bucket/a.tar"):
        cache.add(name(1), SIZE, lambda: blocks, name="s3://bucket/a.tar")
    assert not held(cache)
    assert not list(cache.folder.glob("*.partial"))
    with raises(StorageError, "mismatch", names="an.index"):
        cache.read(name(1), lambda: content(2), name="an.index")


def _fetch(folder: Path, started: Path, numbers: list[int]) -> None:
    """Fetch files into a cache, noting each fetch."""
    cache = Cache(folder, 4 * SIZE, protected=0)

    def blocks(number: int) -> Iterator[bytes]:
        with (started / f"{number}-{os.getpid()}-{time.monotonic_ns()}").open("x"):
            yield content(number)

    for number in numbers:
        path = cache.add(name(number), SIZE, lambda number=number: blocks(number), name="file")
        if path is not None:
            try:
                assert path.read_bytes() == content(number)
            except FileNotFoundError:
                continue  # replaced by another process since
        assert cache.use().bytes <= 4 * SIZE


def test_processes_share_a_cache_within_its_limit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    numbers = [*range(6), *range(6)]
    orders = [numbers, numbers[::-1], numbers[3:] + numbers[:3]]
    workers = [
        context.Process(target=_fetch, args=(tmp_path / "cache", tmp_path, order))
        for order in orders
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    cache = Cache(tmp_path / "cache", 4 * SIZE)
    assert 1 <= len(held(cache)) <= 4
    assert not list(cache.folder.glob("*.partial"))


def test_a_file_is_fetched_once_by_processes_that_want_it_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_fetch, args=(tmp_path / "cache", tmp_path, [1, 2, 3]))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(list(tmp_path.glob("*-*-*"))) == 3


def _hang(folder: Path) -> None:
    def blocks() -> Iterator[bytes]:
        yield content(1)[:10]
        time.sleep(60)

    Cache(folder, 2 * SIZE).add(name(1), SIZE, blocks, name="file")


def test_what_a_killed_process_had_begun_is_removed(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_hang, args=(tmp_path / "cache",))
    worker.start()
    cache = Cache(tmp_path / "cache", 2 * SIZE)
    while not list(cache.folder.glob("*.partial")):
        time.sleep(0.01)
    assert add(cache, 2) is not None
    assert (
        cache.add(name(1), SIZE, lambda: [content(1)], name="file", wait=False) is None
    )  # being fetched
    assert add(cache, 3) is None  # its space is reserved
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert add(cache, 3) is not None
    assert held(cache) == [2, 3]
    assert not list(cache.folder.glob("*.partial"))


def test_cache_that_cannot_be_written_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file/cache", 10 * SIZE)
    assert add(cache, 1) is None
    assert cache.read(name(1), lambda: content(1), name="file") == content(1)
    assert "cannot be used" in caplog.text


def plant(cache: Cache, number: int, data: bytes) -> None:
    """Put a file into the cache under the hash of another content, as another program could."""
    cache.folder.mkdir(exist_ok=True)
    (cache.folder / name(number)).write_bytes(data)


@pytest.mark.parametrize("data", [b"x" * SIZE, b"", b"x"], ids=["same size", "empty", "short"])
def test_a_planted_file_is_not_believed(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    plant(cache, 1, data)
    assert cache.find(name(1)) is None
    assert "another content" in caplog.text
    path = add(cache, 1)
    assert path is not None
    assert path.read_bytes() == content(1)
    assert Cache(cache.folder, cache.limit).read(
        name(1), lambda: b"not asked", name="x"
    ) == content(1)


def test_a_file_that_was_changed_since_it_was_compared_is_fetched_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    path = add(cache, 1)
    assert path is not None
    found = path.stat()
    path.write_bytes(b"x" * SIZE)
    os.utime(
        path, ns=(found.st_atime_ns, found.st_mtime_ns)
    )  # the time of the last change cannot be set back
    fresh = Cache(cache.folder, cache.limit)
    assert fresh.read(name(1), lambda: content(1), name="x") == content(1)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(content(1))
    assert Cache(cache.folder, cache.limit).find(name(1)) is None


def test_a_file_from_elsewhere_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    plant(cache, 1, content(1))  # a copy of another machine's cache
    assert cache.find(name(1)) is not None
    monkeypatch.setattr(cache_module, "sha256_of", None)  # a second comparison would fail
    assert Cache(cache.folder, cache.limit).find(name(1)) is not None


def test_the_folder_is_closed_to_others_and_their_marks_do_not_count(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    path = add(cache, 1)
    assert path is not None
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    path.write_bytes(b"x" * SIZE)
    found = path.stat()
    times = f"{found.st_mtime_ns} {found.st_ctime_ns}"
    (cache.folder / "verified" / name(1)).write_text(
        f"{found.st_dev} {found.st_ino} {found.st_size} {times}\n"
    )
    cache.folder.chmod(0o777)
    assert Cache(cache.folder, cache.limit).find(name(1)) is None
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    add(cache, 1)
    owner = cache.folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    other = Cache(cache.folder, cache.limit)
    assert other.find(name(1)) is None
    assert add(other, 2) is None
    assert other.read(name(2), lambda: content(2), name="x") == content(2)
    assert "belongs to another user" in caplog.text


def test_settings_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("MEDVL_CACHE_SIZE", "1.5 GB")
    cache = Cache.from_environment()
    assert (cache.folder, cache.limit) == (tmp_path / "here", 1_500_000_000)
    monkeypatch.delenv("MEDVL_CACHE_SIZE")
    assert 0 < Cache.from_environment().limit <= 100 * 10**9
    assert parse_bytes("200GB") == 200 * 10**9
    with raises(ConfigError, "malformed", "MEDVL_CACHE_SIZE"):
        parse_bytes("a lot")


def test_clear_removes_everything(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10 * SIZE)
    add(cache, 1)
    assert cache.clear().files == 1
    assert cache.use().files == 0
    assert cache.find(name(1)) is None
