"""Shards in an object store: the samples, order and position of local ones."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.object_store import Bucket
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sources import ConcatSource, Subset
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import RemotePath, locate
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ShardError, StorageError

TOKENIZER = train_wordpiece(["this is image number of all"], vocab_size=60, min_frequency=1)
SETTINGS: dict[str, Any] = {
    "image": ConVIRTAugmentation(size=32, flip="off"),
    "text": WholeText(),
    "tokenizer": TOKENIZER,
    "seed": 5,
    "train": True,
}
COUNT = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of five samples."""
    home = tmp_path_factory.mktemp("shards")
    write_shards(
        make_plan(home / "images", COUNT),
        Deidentifier(bytes(16)),
        ShardRun(out=home / "out", workers=1),
        OPTIONS,
    )
    return home / "out/train"


@pytest.fixture
def address(bucket: Bucket, folder: Path) -> str:
    return bucket.upload(folder, "lab/train")


def batches(source: Any, **changes: Any) -> list[tuple[list[str], torch.Tensor]]:
    return [
        (batch.keys, batch.image_BCHW)
        for batch in open_loader(source, **{"batch": 4, **SETTINGS, **changes})
    ]


def assert_equal(
    first: list[tuple[list[str], torch.Tensor]], second: list[tuple[list[str], torch.Tensor]]
) -> None:
    assert [keys for keys, _ in first] == [keys for keys, _ in second]
    assert all(
        torch.equal(image, other) for (_, image), (_, other) in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("limit", [0, 10**9])
def test_samples_are_those_of_the_local_folder(
    folder: Path, address: str, tmp_path: Path, limit: int
) -> None:
    local, remote = (
        ShardSource(folder),
        ShardSource(address, cache=Cache(tmp_path / "cache", limit)),
    )
    assert remote.manifest == local.manifest
    assert remote.fingerprint == local.fingerprint
    for position in [*range(len(local) - 1, -1, -1), *range(len(local))]:
        assert remote.sample(position) == local.sample(position)
        assert remote.image_bytes(position) == local.image_bytes(position)


def test_order_is_that_of_the_local_folder_on_one_and_two_ranks(folder: Path, address: str) -> None:
    local, remote = ShardSource(folder), ShardSource(address)
    assert_equal(batches(remote), batches(local))
    for rank in range(2):
        ranks = {"rank": rank, "world": 2}
        assert_equal(batches(remote, workers=rank, **ranks), batches(local, **ranks))


@pytest.mark.parametrize("position", [3, 7])
def test_resume_continues_within_an_epoch(folder: Path, address: str, position: int) -> None:
    def endless(loader: Loader) -> Iterator[list[str]]:
        while True:
            yield from (batch.keys for batch in loader)

    local = open_loader(ShardSource(folder), batch=4, **SETTINGS)
    expected = list(itertools.islice(endless(local), position + 6))[position:]
    first = open_loader(ShardSource(address), batch=4, **SETTINGS)
    for _ in itertools.islice(endless(first), position):
        pass
    again = open_loader(ShardSource(address), batch=4, **SETTINGS)
    again.load_state_dict(first.state_dict())
    assert list(itertools.islice(endless(again), 6)) == expected


def test_local_state_is_resumed_on_remote_shards(folder: Path, address: str) -> None:
    """Shards may move between two runs: their content decides."""
    local = open_loader(ShardSource(folder), batch=4, **SETTINGS)
    next(iter(local))
    remote = open_loader(ShardSource(address), batch=4, **SETTINGS)
    remote.load_state_dict(local.state_dict())
    assert [batch.keys for batch in remote] == [keys for keys, _ in batches(ShardSource(folder))][
        1:
    ]


def test_views_of_remote_shards_read_in_threads(folder: Path, address: str, bucket: Bucket) -> None:
    remote, local = ShardSource(address, cache=Cache("/nowhere", 0)), ShardSource(folder)
    assert_equal(batches(Subset(remote, range(8))), batches(Subset(local, range(8))))
    bucket.proxy.fail_always("slow", ".tar")
    bucket.proxy.requests.clear()
    assert len(batches(Subset(remote, range(8, 20)), batch=12)) == 1
    tars = [path for _, path, _ in bucket.proxy.requests if ".tar" in path]
    assert len(tars) == 12  # one request for the image and the JSON of a sample
    with raises(ConfigError, "conflict"):
        ConcatSource([remote, local])  # the same shards twice


def test_path_of_an_address_is_accepted(address: str) -> None:
    assert len(ShardSource(Path(address))) == COUNT
    assert locate(Path(address)) == RemotePath(address)


def test_remote_folder_is_verified(folder: Path, address: str, bucket: Bucket) -> None:
    assert not verify_folder(address, decode=True).problems
    key = "lab/train/lab-train-000002.tar"
    damaged = bytearray(bucket.get(key))
    damaged[700] ^= 1
    bucket.put(key, bytes(damaged))
    bucket.put("lab/train/other.tar", b"x")
    assert verify_folder(address).problems == (
        "lab-train-000002.tar: sha256 differs from the manifest",
        "other.tar is not in the manifest",
    )


def test_missing_files_and_other_sizes_are_named(
    folder: Path, address: str, bucket: Bucket
) -> None:
    with raises(ShardError, "not_found", names=f"{bucket.address}/nowhere/manifest.json"):
        ShardSource(f"{bucket.address}/nowhere")
    bucket.put(
        "lab/train/lab-train-000001.tar", bucket.get("lab/train/lab-train-000001.tar")[:-512]
    )
    with raises(ShardError, "mismatch", names="lab-train-000001.tar"):
        ShardSource(address)
    bucket.client.delete_object(Bucket=bucket.name, Key="lab/train/lab-train-000001.tar")
    with raises(ShardError, "not_found", names="lab-train-000001.tar"):
        ShardSource(address)


def test_index_that_differs_from_the_manifest_is_refused(address: str, bucket: Bucket) -> None:
    content = json.loads(bucket.get("lab/train/manifest.json"))
    content["shards"][3]["index_sha256"] = "0" * 64
    bucket.put("lab/train/manifest.json", json.dumps(content).encode())
    with raises(StorageError, "mismatch", names="lab-train-000003.index"):
        ShardSource(address)


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("https://user:secret-word@host/x", "malformed"),
        ("https://host/x?sig=secret-word", "malformed"),
        ("s3://bucket/$(secret-word)", "malformed"),
        ("s3://bucket/../secret-word", "malformed"),
        ("s3://bucket/a;secret-word", "malformed"),
        ("file:///etc/secret-word", "unsupported"),
        ("ftp://host/secret-word", "unsupported"),
    ],
)
def test_addresses_with_secrets_or_special_characters_are_refused(text: str, code: str) -> None:
    with raises(ConfigError, code, "address") as caught:
        locate(text)
    assert "secret-word" not in str(caught.value)
