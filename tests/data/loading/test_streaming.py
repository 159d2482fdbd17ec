"""Remote shards, streamed from a web server on this machine."""

import functools
import http.server
import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import open_loader
from medvl.data.loading.streaming import RemoteLoader, _url, is_address, open_remote_loader
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ShardError

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="webdataset streams through curl")
TOKENIZER = train_wordpiece(["this is image number of all"], vocab_size=60, min_frequency=1)
SETTINGS: dict[str, Any] = {
    "image": ConVIRTAugmentation(size=32, flip="off"),
    "text": WholeText(),
    "tokenizer": TOKENIZER,
    "seed": 5,
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, deid: Deidentifier) -> Path:
    write_shards(make_plan(tmp_path / "images", 40), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)
    return tmp_path / "out/train"


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/train"
        server.shutdown()


@pytest.fixture
def open_it(address: str) -> Callable[..., RemoteLoader]:
    def opener(**changes: Any) -> RemoteLoader:
        return open_remote_loader(address, **{"batch": 4, "workers": 0, **SETTINGS, **changes})

    return opener


def test_epoch_yields_each_sample_about_once_in_a_new_order(open_it: Callable[..., RemoteLoader], folder: Path) -> None:
    loader = open_it()
    assert loader.manifest == Manifest.read(folder)
    first, second = ([key for batch in loader for key in batch.keys] for _ in range(2))
    assert len(first) == len(second) == 40
    assert first != second
    assert max(Counter(first).values()) <= 2
    assert len(set(first)) >= 20
    assert [key for batch in open_it() for key in batch.keys] == first


def test_samples_equal_those_of_the_local_loader(open_it: Callable[..., RemoteLoader], folder: Path) -> None:
    local = open_loader(ShardSource(folder), batch=1, train=True, **SETTINGS)
    expected = {batch.keys[0]: batch for batch in local}
    for batch in open_it():
        for row, key in enumerate(batch.keys):
            assert batch.texts[row] == expected[key].texts[0]
            assert batch.studies is not None
            assert batch.studies[row : row + 1] == expected[key].studies
            assert torch.equal(batch.image_BCHW[row], expected[key].image_BCHW[0])
            assert torch.equal(batch.labels_BL[row], expected[key].labels_BL[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_read_disjoint_shards(open_it: Callable[..., RemoteLoader], workers: int) -> None:
    ranks = [list(open_it(rank=rank, world=2, workers=workers)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [10, 10]
    assert {len(batch) for batches in ranks for batch in batches} == {2}
    first, second = ({key for batch in batches for key in batch.keys} for batches in ranks)
    assert not first & second


@pytest.mark.parametrize("position", [0, 3, 10, 13])
def test_resume_yields_the_remaining_batches(open_it: Callable[..., RemoteLoader], position: int) -> None:
    def endless(loader: RemoteLoader) -> Iterator[list[str]]:
        while True:
            yield from (batch.keys for batch in loader)

    loader = open_it()
    batches = endless(loader)
    for _ in range(position):
        next(batches)
    again = open_it()
    again.load_state_dict(loader.state_dict())
    assert list(itertools.islice(endless(again), 8)) == list(itertools.islice(batches, 8))
    with raises(ConfigError, "mismatch", "seed"):
        open_it(seed=6).load_state_dict(loader.state_dict())


def test_truncated_streams_and_missing_manifests_raise(
    open_it: Callable[..., RemoteLoader], folder: Path, address: str
) -> None:
    loader = open_it()
    for tar in folder.glob("*.tar"):
        tar.write_bytes(tar.read_bytes()[:3000])
    with raises(ShardError, "truncated", names="train-00000"):
        list(loader)
    with raises(ShardError, "unreadable", names="manifest.json"):
        open_remote_loader(address + "/nowhere", batch=4, workers=0, **SETTINGS)


@pytest.mark.parametrize(
    ("changes", "field", "names"),
    [
        ({"batch": 3, "rank": 0, "world": 2}, "batch", "2 ranks"),
        ({"batch": 41}, "batch", "got 41"),
        ({"workers": 5, "world": 2, "rank": 1}, "workers", "10 readers"),
    ],
)
def test_invalid_settings_are_refused(
    open_it: Callable[..., RemoteLoader], changes: dict, field: str, names: str
) -> None:
    with raises(ConfigError, "conflict", field, names=names):
        open_it(**changes)


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    "address", ["https://host/a b", "s3://bucket/$(id)", "s3://b/a;id", "file:///etc", "s3://b/'x'"]
)
def test_addresses_with_special_characters_are_refused(address: str) -> None:
    with raises(ConfigError, "malformed", "address"):
        _url(address, "x.tar")


def test_s3_addresses_use_the_aws_command() -> None:
    assert _url("s3://bucket/train/", "a.tar") == "pipe:aws s3 cp --quiet s3://bucket/train/a.tar -"
    assert is_address("https://host/x")
    assert not is_address("shards/train")
