"""Faults of the data: workers that die or hang, damaged shards of every kind, ranks without data, other ranks midway."""

import io
import json
import multiprocessing
import os
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.streaming import open_remote_loader
from medvl.data.loading.subset import no_text
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import Index
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import BudgetError, ConfigError, LoaderError, ShardError
from medvl.schema import Sample

COUNT, BATCH = 26, 4
SETTINGS: dict[str, Any] = {"image": EvalTransform(size=32), "text": WholeText(), "tokenizer": no_text, "seed": 3}


def write(folder: Path, deid: Deidentifier) -> Path:
    write_shards(make_plan(folder / "images", COUNT), deid, ShardRun(out=folder / "out", workers=1), OPTIONS)
    return folder / "out" / "train"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shards"), Deidentifier(b"0" * 32))


@pytest.fixture
def folder(tmp_path: Path, deid: Deidentifier) -> Path:
    """One to damage."""
    return write(tmp_path, deid)


def opened(folder: Path, **changes: Any) -> Loader:
    return open_loader(ShardSource(folder), **{"batch": BATCH, "train": True, **SETTINGS, **changes})


class Trap:
    """Samples whose third one stops the worker that reads it."""

    label_names: tuple[str, ...] = ()
    fingerprint = "trap"

    def __init__(self, what: Callable[[], object]) -> None:
        self.what, self.parent = what, os.getpid()

    def __len__(self) -> int:
        return 12

    def sample(self, position: int) -> Sample:
        return Sample(key=f"k{position}", corpus="c", split="s", patient="p", study="t", sections={"caption": "x"})

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        if position == 2:
            assert os.getpid() != self.parent
            self.what()
        return np.zeros((40, 40), np.uint8)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.fault("F6")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (die, r"worker died .*fewer --data.workers"),
        (hang, "returned nothing within the timeout; check the disk"),
        (stop, "returned nothing within the timeout"),
    ],
    ids=["dies", "hangs", "is stopped"],
)
def test_a_worker_that_dies_or_hangs_is_an_error_and_no_deadlock(what: Callable[[], object], message: str) -> None:
    started = time.monotonic()
    loader = open_loader(Trap(what), batch=2, train=False, workers=2, timeout=2.0, **SETTINGS)
    with pytest.raises(LoaderError, match=message):
        list(loader)
    del loader
    assert time.monotonic() - started < 120  # and not for ever; a machine may be busy
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children(), "a worker is left behind"


@pytest.mark.fault("F6")
def test_other_errors_of_a_worker_stay_what_they_are() -> None:
    def broken() -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        list(open_loader(Trap(broken), batch=2, train=False, workers=1, **SETTINGS))


def keys(loaders: list[Loader], epochs: int) -> list[Counter[str]]:
    """What all ranks together are handed in each global batch, until the epoch of that number begins."""
    seen = []
    while loaders[0].epoch < epochs:
        for batches in zip(*loaders, strict=True):
            seen += [Counter(key for batch in batches for key in batch.keys)]
    return seen


@pytest.mark.fault("F7")
@pytest.mark.fault("F8")
@pytest.mark.fault("F9")
@pytest.mark.parametrize("position", [0, 1, 3, 5, 6, 7, 11], ids=lambda at: f"batch {at}")
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (4, 0)])
def test_going_on_with_other_workers_and_ranks_gives_the_same_samples(
    position: int, world: int, workers: int, shards: Path
) -> None:
    """At the first batch, in the middle, at the last one, at the edge of an epoch: each global batch is the same."""
    whole = opened(shards)
    assert whole.steps_per_epoch == 6
    expected = keys([whole], 2)[position:]
    first = opened(shards)
    handed = 0
    while handed < position:
        for _ in first:
            handed += 1
            if handed == position:
                break
    state = json.loads(json.dumps(first.state_dict()))
    others = [opened(shards, rank=rank, world=world, workers=workers) for rank in range(world)]
    for other in others:
        other.load_state_dict(state)
    assert keys(others, 2) == expected


def member(name: str, data: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


class Damage:
    """Ways to spoil the first shard of a folder under its own name and size, as a disk or a bad copy does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tar = folder, folder / "lab-train-000000.tar"
        self.index = Index.read(self.tar.with_suffix(".index"))
        self.data = bytearray(self.tar.read_bytes())

    def truncated(self) -> None:
        os.truncate(self.tar, len(self.data) // 2)

    def zero_bytes(self) -> None:
        self.tar.write_bytes(b"")

    def filled_with_zeros(self) -> None:
        self.tar.write_bytes(bytes(len(self.data)))

    def bad_header(self) -> None:
        self.data[:512] = b"\xff" * 512
        self.tar.write_bytes(self.data)

    def missing_member(self) -> None:
        start, size = map(int, self.index.meta[0])
        end = start + size + -size % 512
        self.tar.write_bytes(self.data[: start - 512] + self.data[end:] + bytes(end - start + 512))

    def duplicate_key(self) -> None:
        """The second sample under the first one's name."""
        for row in (self.index.image[1], self.index.meta[1]):
            place = int(row[0]) - 512
            header = tarfile.TarInfo.frombuf(bytes(self.data[place : place + 512]), "ascii", "strict")
            header.name = header.name.replace("key001", "key000")
            self.data[place : place + 512] = header.tobuf(tarfile.USTAR_FORMAT)
        start, size = map(int, self.index.meta[1])
        self.data[start : start + size] = self.data[start : start + size].replace(b'"key001"', b'"key000"')
        self.tar.write_bytes(self.data)

    def interleaved_keys(self) -> None:
        """The texts of two samples in each other's place."""
        (one, size), (two, _) = (map(int, row) for row in self.index.meta[:2])
        self.data[one : one + size], self.data[two : two + size] = (
            self.data[two : two + size],
            self.data[one : one + size],
        )
        self.tar.write_bytes(self.data)

    def wrong_suffix(self) -> None:
        text = self.tar.with_suffix(".index").read_text().replace("\tpng\t", "\texe\t")
        self.tar.with_suffix(".index").write_text(text)

    def text_that_is_no_utf8(self) -> None:
        start, size = map(int, self.index.meta[0])
        place = self.data.index(b"This is", start, start + size)
        self.data[place : place + 4] = b"\xff\xfe\xff\xfe"
        self.tar.write_bytes(self.data)

    def flipped_bit_of_an_image(self) -> None:
        start, size = map(int, self.index.image[0])
        self.data[start + size // 2] ^= 16
        self.tar.write_bytes(self.data)


KINDS = {  # what the loader says of it: refused when opened, counted as skipped, or (a single bit) decoded as it is
    "truncated": "opening",
    "zero_bytes": "opening",
    "filled_with_zeros": "skipped",
    "bad_header": "read",  # the index says where the members lie: their headers are not needed
    "missing_member": "skipped",
    "duplicate_key": "skipped",
    "interleaved_keys": "skipped",
    "wrong_suffix": "opening",
    "text_that_is_no_utf8": "skipped",
    "flipped_bit_of_an_image": "either",
}


@pytest.mark.fault("F11")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_shards_are_refused_or_counted_and_verify_finds_all(kind: str, folder: Path) -> None:
    getattr(Damage(folder), kind)()
    assert verify_folder(folder).problems, "verify finds it by its hash"
    if KINDS[kind] == "opening":
        with pytest.raises(ShardError, match="000000"):
            ShardSource(folder)
        return
    loader = opened(folder, batch=13, train=False, max_skipped=13)
    seen = Counter(key for batch in loader for key in batch.keys)
    assert max(seen.values()) == 1, "no sample twice"
    assert seen.total() + loader.skipped.total() == COUNT, "every sample is counted"
    assert seen.total() >= COUNT - 5, "the other shards are read"
    if KINDS[kind] == "skipped":
        assert loader.skipped.total() >= 1
        with pytest.raises(BudgetError, match="medvl verify"):
            list(opened(folder, batch=13, train=False, max_skipped=0))
    if KINDS[kind] == "read":
        assert loader.skipped.total() == 0


@pytest.mark.fault("F11")
def test_an_empty_report_is_no_text_and_no_damage(tmp_path: Path, deid: Deidentifier) -> None:
    """Left out by rule and counted when shards are made; kept where that is asked for, and flagged in the batch."""
    import dataclasses

    plan = make_plan(tmp_path / "images", 4)
    plan.records[1] = dataclasses.replace(
        plan.records[1], sample=dataclasses.replace(plan.records[1].sample, sections={"findings": " "})
    )
    plan.records[2] = dataclasses.replace(
        plan.records[2], sample=dataclasses.replace(plan.records[2].sample, sections={})
    )
    run = ShardRun(out=tmp_path / "kept", workers=1)
    write_shards(plan, deid, run, dataclasses.replace(OPTIONS, keep_textless=True))
    batch = next(iter(opened(tmp_path / "kept" / "train", train=False)))
    assert batch.has_text_B is not None
    assert batch.has_text_B.tolist() == [True, False, False, True]


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 64, "world": 8}, "larger than the 26 samples"),
        ({"batch": 4, "world": 8}, "not divisible by 8 ranks"),
    ],
)
def test_ranks_that_would_get_nothing_hear_of_it_at_once(changes: dict[str, int], message: str, shards: Path) -> None:
    started = time.process_time()
    for rank in range(changes["world"]):
        with pytest.raises(ConfigError, match=message):
            opened(shards, rank=rank, **changes)
    assert time.process_time() - started < 5


@pytest.mark.fault("F13")
def test_fewer_remote_shards_than_readers_is_said_at_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webdataset

    manifest = (shards / "manifest.json").read_bytes()
    monkeypatch.setattr(webdataset, "gopen", lambda url: io.BytesIO(manifest))
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"6 shards are too few for 8 readers \(4 ranks of 2 workers\)"):
        open_remote_loader("https://host/train", batch=4, world=4, workers=2, **SETTINGS)
    assert time.process_time() - started < 5


@pytest.mark.fault("F13")
def test_a_rank_without_a_batch_of_validation_has_none_and_waits_for_nobody(shards: Path) -> None:
    ranks = [list(opened(shards, batch=20, train=False, rank=rank, world=4)) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1, 1, 0, 0]
    assert sum(len(batch) for batches in ranks for batch in batches) == COUNT
    assert torch.is_tensor(ranks[0][0].image_BCHW)
