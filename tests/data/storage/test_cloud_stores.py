"""Google Cloud Storage and Azure: their libraries against stand-ins of the services, with
faults.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from helpers.cloud_stores import AZURE_KEY, AzureHandler, GoogleHandler, Objects, serve
from helpers.errors import raises
from helpers.object_store import Proxy, proxied
from helpers.shard_plans import OPTIONS, contents, make_plan

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
from medvl.data.storage.location import RemotePath
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ShardError, StorageError

SETTINGS: dict[str, Any] = {
    "image": EvalTransform(size=32),
    "text": WholeText(),
    "tokenizer": no_text,
    "train": True,
}
COUNT = 10
TAR = "lab-train-000001.tar"


@dataclasses.dataclass
class Cloud:
    """A store with its proxy."""

    address: str
    objects: Objects
    proxy: Proxy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of five samples."""
    home = tmp_path_factory.mktemp("shards")
    run = ShardRun(out=home / "out", workers=1)
    write_shards(make_plan(home / "images", COUNT), Deidentifier(bytes(16)), run, OPTIONS)
    return home / "out"


@pytest.fixture(params=["gs", "az"])
def cloud(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Cloud]:
    scheme = request.param
    pytest.importorskip(store.PACKAGES[scheme])
    monkeypatch.setenv("MEDVL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(store, "_opened", {})
    handler = GoogleHandler if scheme == "gs" else AzureHandler
    with serve(handler) as (port, objects), proxied("127.0.0.1", port) as proxy:
        if scheme == "gs":
            options: dict[str, Any] = {"endpoint_url": proxy.url, "token": "anon"}
        else:
            names = {
                "AccountName": "lab",
                "AccountKey": AZURE_KEY,
                "BlobEndpoint": f"{proxy.url}/lab",
            }
            texts = [f"{name}={value}" for name, value in names.items()]
            options = {"connection_string": ";".join(["DefaultEndpointsProtocol=http", *texts])}
        monkeypatch.setitem(fsspec.config.conf, scheme, options)
        yield Cloud(f"{scheme}://bucket", objects, proxy)


def keys(source: ShardSource, **changes: Any) -> list[list[str]]:
    loader = open_loader(source, **{"batch": 4, **SETTINGS, **changes})
    found = [batch.keys for batch in loader]
    assert not loader.skipped
    return found


def test_shards_go_there_and_back(cloud: Cloud, folder: Path, tmp_path: Path) -> None:
    upload_shards(folder, f"{cloud.address}/lab")
    assert cloud.objects.data == {
        f"lab/train/{name}": data for name, data in contents(folder / "train").items()
    }
    address = f"{cloud.address}/lab/train"
    assert not verify_folder(address).problems
    local = ShardSource(folder / "train")
    for limit in (0, 10**9):
        remote = ShardSource(address, cache=Cache(tmp_path / f"cache-{limit}", limit))
        assert remote.manifest == local.manifest
        for rank in range(2):
            assert keys(remote, rank=rank, world=2) == keys(local, rank=rank, world=2)
        assert [remote.image_bytes(n) for n in range(COUNT)] == [
            local.image_bytes(n) for n in range(COUNT)
        ]


def test_large_files_are_sent_in_parts(cloud: Cloud, tmp_path: Path) -> None:
    data = bytes(range(256)) * (6 * 2**12)
    (tmp_path / "large").write_bytes(data)
    target = RemotePath(f"{cloud.address}/large")
    store.write(target.url, tmp_path / "large")
    assert cloud.objects.data["large"] == data
    assert target.read_range(2**20, 100) == data[2**20 : 2**20 + 100]
    target.download(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    store.remove(target.url)
    assert not target.exists()
    assert not cloud.objects.data


def test_what_is_not_there(cloud: Cloud) -> None:
    with raises(ShardError, "not_found"):
        ShardSource(f"{cloud.address}/lab/train")
    cloud.objects.data["a/b"] = b"1"
    path = RemotePath(f"{cloud.address}/a")
    assert (path.sizes(), (path / "b").sizes(), (path / "c").sizes()) == ({"b": 1}, {}, {})
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    with pytest.raises(FileNotFoundError):
        store.remove(f"{cloud.address}/a/c")


@pytest.mark.parametrize("fault", ["reset", "truncated", "short", "503"])
def test_passing_faults_change_nothing(fault: str, cloud: Cloud, folder: Path) -> None:
    upload_shards(folder, f"{cloud.address}/lab")
    cloud.proxy.fail_first(
        2, fault, ".tar" if fault == "short" else "lab-train-"
    )  # a short index has another hash
    remote = ShardSource(f"{cloud.address}/lab/train", cache=Cache("/nowhere", 0))
    assert keys(remote) == keys(ShardSource(folder / "train"))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("reset", "network"),
        ("truncated", "network"),
        ("503", "network"),
        ("denied", "denied"),
        ("short", "truncated"),
    ],
)
def test_lasting_faults_are_named(
    fault: str, code: str, cloud: Cloud, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REMOTE_RETRIES", "1")
    upload_shards(folder, f"{cloud.address}/lab")
    source = ShardSource(f"{cloud.address}/lab/train", cache=Cache("/nowhere", 0))
    cloud.proxy.fail_always(fault, TAR)
    started = time.perf_counter()
    with raises(StorageError, code, names=TAR) as caught:
        keys(source, max_skipped=1000)
    assert AZURE_KEY not in str(caught.value)
    assert time.perf_counter() - started < 15, (
        "the libraries repeat requests with pauses of their own"
    )


def test_lists_that_are_cut_into_pages(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services answer a list of many objects in several parts."""
    monkeypatch.setattr(Objects, "PAGE", 3)
    cloud.objects.data.update({f"lab/{number:02d}": bytes(number) for number in range(10)})
    assert RemotePath(f"{cloud.address}/lab").sizes() == {
        f"{number:02d}": number for number in range(10)
    }


def test_azure_without_an_account_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    monkeypatch.setattr(store, "_opened", {})
    for name in [name for name in os.environ if name.startswith("AZURE_STORAGE")]:
        monkeypatch.delenv(name)
    with raises(ConfigError, "missing", "address", names="AZURE_STORAGE_ACCOUNT_NAME"):
        ShardSource("az://container/train")
