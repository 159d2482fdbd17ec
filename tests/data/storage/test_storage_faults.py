"""Faults of an object store: repeated where that helps, named where it does not, and never a
lost or other sample.
"""

import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from helpers.errors import raises
from helpers.object_store import Bucket, proxied
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import no_text
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.shards.upload import upload_shards
from medvl.data.shards.verify import verify_folder
from medvl.data.storage import store
from medvl.data.storage.cache import Cache
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, StorageError

SETTINGS: dict[str, Any] = {
    "image": EvalTransform(size=32),
    "text": WholeText(),
    "tokenizer": no_text,
    "train": True,
}
COUNT = 10
TAR = "lab-train-000001.tar"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of five samples."""
    home = tmp_path_factory.mktemp("shards")
    run = ShardRun(out=home / "out", workers=1)
    write_shards(make_plan(home / "images", COUNT), Deidentifier(bytes(16)), run, OPTIONS)
    return home / "out/train"


@pytest.fixture
def address(bucket: Bucket, folder: Path) -> str:
    return bucket.upload(folder, "lab/train")


def keys(source: ShardSource, **changes: Any) -> list[list[str]]:
    loader = open_loader(source, **{"batch": 5, **SETTINGS, **changes})
    found = [batch.keys for batch in loader]
    assert not loader.skipped
    return found


@pytest.mark.parametrize("fault", ["reset", "truncated", "short", "slow", "503"])
def test_passing_faults_change_nothing(
    fault: str, bucket: Bucket, address: str, folder: Path
) -> None:
    """The first requests of every file fail, in all ways of reading."""
    bucket.proxy.fail_first(2, fault, "lab/train/lab-")
    remote = ShardSource(address, cache=Cache("/nowhere", 0))
    assert keys(remote) == keys(ShardSource(folder))
    local = ShardSource(folder)
    bucket.proxy.fail_first(2, fault, "lab/train/lab-")
    cached = ShardSource(address)
    assert [cached.image_bytes(n) for n in range(COUNT)] == [
        local.image_bytes(n) for n in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("reset", "network"),
        ("truncated", "network"),
        ("503", "network"),
        ("expired", "denied"),
        ("denied", "denied"),
    ],
)
def test_lasting_faults_are_named(
    fault: str, code: str, bucket: Bucket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials expire, or the network fails, while a run reads. No sample is skipped,
    whatever the budget.
    """
    monkeypatch.setenv("MEDVL_REMOTE_RETRIES", "1")
    source = ShardSource(address, cache=Cache("/nowhere", 0))
    bucket.proxy.fail_always(fault, TAR)
    for workers in (0, 1) if fault == "expired" else (0,):
        with raises(StorageError, code, names=f"{address}/{TAR}") as caught:
            keys(source, workers=workers, max_skipped=1000)
        assert "secret" not in str(caught.value)
    if fault == "expired":
        assert "ExpiredToken" in str(caught.value)
    bucket.proxy.heal()
    assert len(keys(source)) == 2


def test_answers_that_stay_short_are_named(
    bucket: Bucket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REMOTE_RETRIES", "1")
    source = ShardSource(address, cache=Cache("/nowhere", 0))
    bucket.proxy.fail_always("short", TAR)
    with raises(StorageError, "truncated", names=TAR):
        keys(source)


def test_refused_access_is_named_when_the_folder_is_opened(bucket: Bucket, address: str) -> None:
    for fault in ("denied", "expired"):
        bucket.proxy.requests.clear()
        bucket.proxy.fail_always(fault, "manifest.json")
        with raises(StorageError, "denied", names="credentials"):
            ShardSource(address)
        assert bucket.proxy.answered("manifest.json") <= 1  # not repeated


def test_shard_that_is_replaced_during_a_run_is_refused(
    bucket: Bucket, address: str, tmp_path: Path
) -> None:
    """With the same size and members it is noticed by its hash, before it enters the cache."""
    cache = Cache(tmp_path / "cache", 10**9)
    source = ShardSource(address, cache=cache)
    data = bytearray(bucket.get(f"lab/train/{TAR}"))
    data[600] ^= 1
    bucket.put(f"lab/train/{TAR}", bytes(data))
    end = time.monotonic() + 30  # a thread fetches the shard and finds it
    with raises(StorageError, "mismatch", names=TAR):
        while time.monotonic() < end:
            for position in range(5, COUNT):
                source.sample(position)
                source.image_bytes(position)
    assert source.manifest.shards[1].sha256 not in [path.name for path in cache.folder.iterdir()]


def test_verify_repeats_requests_and_reports_what_is_missing(bucket: Bucket, address: str) -> None:
    bucket.proxy.fail_first(1, "reset", ".tar")
    assert not verify_folder(address).problems
    bucket.proxy.fail_always("missing", TAR)
    assert verify_folder(address).problems == (f"{TAR} is missing",)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server that sends whole files, never parts of them."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def web_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(store, "_whole_senders", set())
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("limit", [0, 10**9])
def test_web_server_without_ranges(
    web_server: str, folder: Path, tmp_path: Path, limit: int
) -> None:
    source = ShardSource(web_server, cache=Cache(tmp_path / "cache", limit))
    assert keys(source) == keys(ShardSource(folder))
    assert not verify_folder(web_server).problems


def test_faults_of_a_web_server(
    web_server: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEDVL_REMOTE_RETRIES", "1")
    host, port = web_server.removeprefix("http://").split(":")
    with proxied(host, int(port)) as proxy:
        opened = functools.partial(ShardSource, cache=Cache(tmp_path / "cache", 10**9))
        proxy.fail_first(1, "reset")
        assert keys(opened(proxy.url)) == keys(ShardSource(folder))
        for fault, code in (("denied", "denied"), ("503", "network"), ("truncated", "network")):
            proxy.fail_always(fault)
            with raises(StorageError, code, names="manifest.json"):
                opened(proxy.url)
        proxy.fail_always("503", ".tar")  # asked for its size only
        with raises(StorageError, "network", names=".tar"):
            opened(proxy.url)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.PACKAGES, "gs", "no_such_package")
    with raises(ConfigError, "missing", "address", names="medvl[remote]"):
        ShardSource("gs://bucket/train")


def test_store_without_asynchronous_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the Hugging Face hub's: read, listed and written through files of fsspec."""
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(store, "_filesystem", lambda url: (files, f"/{url.partition('://')[2]}"))
    address = "hf://datasets/lab/shards"
    upload_shards(folder, address)
    source = ShardSource(address, cache=Cache(tmp_path / "cache", 0))
    assert keys(source) == keys(ShardSource(folder))
    assert not verify_folder(address).problems
    files.rm(f"/datasets/lab/shards/{TAR}")
    assert verify_folder(address).problems == (f"{TAR} is missing",)
