"""Data faults: workers that die or hang, damaged shards, ranks without data, resuming with other
ranks.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import workers
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan

from medvl.common.process import signals_blocked
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sources import no_text
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Index
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import BudgetError, ConfigError, LoaderError, ShardError
from medvl.schema import Sample

COUNT, BATCH = 26, 4
SETTINGS: dict[str, Any] = {
    "image": EvalTransform(size=32),
    "text": WholeText(),
    "tokenizer": no_text,
    "seed": 3,
}


def write(folder: Path, deid: Deidentifier) -> Path:
    write_shards(
        make_plan(folder / "images", COUNT), deid, ShardRun(out=folder / "out", workers=1), OPTIONS
    )
    return folder / "out" / "train"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shards"), Deidentifier(b"0" * 32))


@pytest.fixture
def folder(tmp_path: Path, deid: Deidentifier) -> Path:
    """A folder to damage."""
    return write(tmp_path, deid)


def opened(folder: Path, **changes: Any) -> Loader:
    return open_loader(
        ShardSource(folder), **{"batch": BATCH, "train": True, **SETTINGS, **changes}
    )


class FaultySource:
    """A source whose third sample runs a fault in the worker that reads it."""

    label_names: tuple[str, ...] = ()
    fingerprint = "faulty"

    def __init__(self, fault: Callable[[], object]) -> None:
        self.fault, self.parent = fault, os.getpid()

    def __len__(self) -> int:
        return 12

    def sample(self, position: int) -> Sample:
        return Sample(
            key=f"k{position}",
            corpus="c",
            split="s",
            patient="p",
            study="t",
            sections={"caption": "x"},
        )

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        if position == 2:
            assert os.getpid() != self.parent
            self.fault()
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
    ("fault", "names"),
    [(die, "worker died"), (hang, "within the timeout"), (stop, "within the timeout")],
    ids=["dies", "hangs", "is stopped"],
)
def test_dead_or_hung_worker_raises_without_deadlock(
    fault: Callable[[], object], names: str
) -> None:
    started = time.monotonic()
    others = set(multiprocessing.active_children())  # of loaders in earlier tests
    loader = open_loader(
        FaultySource(fault), batch=2, train=False, workers=2, timeout=2.0, **SETTINGS
    )
    with raises(LoaderError, "worker", names=names):
        list(loader)
    del loader
    assert time.monotonic() - started < 120  # generous, for a busy machine
    deadline = time.monotonic() + 60
    while set(multiprocessing.active_children()) - others and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(multiprocessing.active_children()) - others, "a worker is still running"


@pytest.mark.fault("F4")
def test_workers_end_at_the_sigterm_of_their_parent_alone() -> None:
    """systemd and SLURM send it to all processes of a job, of which the training ends with a
    checkpoint.
    """

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    loader = open_loader(FaultySource(end), batch=2, train=False, workers=1, **SETTINGS)
    keys = [key for batch in loader for key in batch.keys]
    assert keys == [f"k{number}" for number in range(12)]
    [worker] = multiprocessing.active_children()  # the same in each epoch
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


_ARMED: list[signal.Signals] = []


def _signal_in_child() -> None:
    """Send the signals that are armed to a child process at its first moment, before any line of
    its own.
    """
    for number in _ARMED:
        os.kill(os.getpid(), number)


os.register_at_fork(after_in_child=_signal_in_child)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_of_a_worker_does_not_end_it(number: signal.Signals) -> None:
    loader = open_loader(FaultySource(lambda: None), batch=2, train=False, workers=2, **SETTINGS)
    _ARMED.append(number)
    try:
        keys = [key for batch in loader for key in batch.keys]
    finally:
        _ARMED.clear()
    assert keys == [f"k{position}" for position in range(12)]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == 0


@pytest.mark.fault("F4")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_know_their_parent_however_they_are_started(method: Any) -> None:
    """Between a fork server's child and this process, the server is the parent."""
    context: Any = multiprocessing.get_context(method)
    ready = context.Event()
    worker = context.Process(target=workers.wait, args=(ready,))
    with (
        signals_blocked()
    ):  # as a loader starts its workers: libraries start threads during their imports
        worker.start()
    assert ready.wait(60)
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # from another process
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0


@pytest.mark.fault("F6")
def test_exceptions_raised_in_a_worker_are_not_translated() -> None:
    def broken() -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        list(open_loader(FaultySource(broken), batch=2, train=False, workers=1, **SETTINGS))


def keys(loaders: list[Loader], epochs: int) -> list[Counter[str]]:
    """Return the keys of each global batch over all ranks, until the start of epoch number
    `epochs`.
    """
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
def test_resume_with_other_workers_and_ranks_yields_the_same_samples(
    position: int, world: int, workers: int, shards: Path
) -> None:
    """Each global batch is the same from the first batch, the middle, the last one and an
    epoch's end.
    """
    reference = opened(shards)
    assert reference.steps_per_epoch == 6
    expected = keys([reference], 2)[position:]
    first = opened(shards)
    consumed = 0
    while consumed < position:
        for _ in first:
            consumed += 1
            if consumed == position:
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
    """Kinds of damage to the first shard of a folder, as by a disk or an incomplete copy."""

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
        """Give the second sample the key of the first."""
        for row in (self.index.image[1], self.index.meta[1]):
            place = int(row[0]) - 512
            header = tarfile.TarInfo.frombuf(
                bytes(self.data[place : place + 512]), "ascii", "strict"
            )
            header.name = header.name.replace("key001", "key000")
            self.data[place : place + 512] = header.tobuf(tarfile.USTAR_FORMAT)
        start, size = map(int, self.index.meta[1])
        self.data[start : start + size] = self.data[start : start + size].replace(
            b'"key001"', b'"key000"'
        )
        self.tar.write_bytes(self.data)

    def interleaved_keys(self) -> None:
        """Swap the JSON of two samples."""
        (one, size), (two, _) = (map(int, row) for row in self.index.meta[:2])
        self.data[one : one + size], self.data[two : two + size] = (
            self.data[two : two + size],
            self.data[one : one + size],
        )
        self.tar.write_bytes(self.data)

    def wrong_suffix(self) -> None:
        text = self.tar.with_suffix(".index").read_text().replace("\tpng\t", "\texe\t")
        self.tar.with_suffix(".index").write_text(text)

    def invalid_utf8(self) -> None:
        start, size = map(int, self.index.meta[0])
        place = self.data.index(b"This is", start, start + size)
        self.data[place : place + 4] = b"\xff\xfe\xff\xfe"
        self.tar.write_bytes(self.data)

    def flipped_bit_of_an_image(self) -> None:
        start, size = map(int, self.index.image[0])
        self.data[start + size // 2] ^= 16
        self.tar.write_bytes(self.data)


# effect on the loader: refused when opened, skipped, read, or either (one flipped bit may still
# decode)
KINDS = {
    "truncated": "opening",
    "zero_bytes": "opening",
    "filled_with_zeros": "skipped",
    "bad_header": "read",  # members are located by the index; tar headers are not read
    "missing_member": "skipped",
    "duplicate_key": "skipped",
    "interleaved_keys": "skipped",
    "wrong_suffix": "opening",
    "invalid_utf8": "skipped",
    "flipped_bit_of_an_image": "either",
}


@pytest.mark.fault("F11")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_shards_are_refused_or_skipped_and_verify_reports_them(
    kind: str, folder: Path
) -> None:
    getattr(Damage(folder), kind)()
    assert verify_folder(folder).problems, "verify compares the hash"
    if KINDS[kind] == "opening":
        with pytest.raises(ShardError, match="000000") as caught:
            ShardSource(folder)
        assert caught.value.code in ("mismatch", "malformed")
        return
    loader = opened(folder, batch=13, train=False, max_skipped=13)
    seen = Counter(key for batch in loader for key in batch.keys)
    assert max(seen.values()) == 1, "no sample is repeated"
    assert seen.total() + loader.skipped.total() == COUNT, "every sample is counted"
    assert seen.total() >= COUNT - 5, "the other shards are read"
    if KINDS[kind] == "skipped":
        assert loader.skipped.total() >= 1
        with raises(BudgetError, "budget"):
            list(opened(folder, batch=13, train=False, max_skipped=0))
    if KINDS[kind] == "read":
        assert loader.skipped.total() == 0


@pytest.mark.fault("F11")
def test_empty_reports_are_flagged_not_skipped(tmp_path: Path, deid: Deidentifier) -> None:
    """With `keep_textless` they are kept and flagged in the batch."""
    import dataclasses

    plan = make_plan(tmp_path / "images", 4)
    plan.records[1] = dataclasses.replace(
        plan.records[1],
        sample=dataclasses.replace(plan.records[1].sample, sections={"findings": " "}),
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
    ("changes", "code"),
    [({"batch": 64, "world": 8}, "too_large"), ({"batch": 4, "world": 8}, "conflict")],
)
def test_batch_that_leaves_ranks_without_data_is_refused_quickly(
    changes: dict[str, int], code: str, shards: Path
) -> None:
    started = time.process_time()
    for rank in range(changes["world"]):
        with raises(ConfigError, code, "batch"):
            opened(shards, rank=rank, **changes)
    assert time.process_time() - started < 5


@pytest.mark.fault("F13")
def test_ranks_without_a_validation_batch_yield_none(shards: Path) -> None:
    ranks = [list(opened(shards, batch=20, train=False, rank=rank, world=4)) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1, 1, 0, 0]
    assert sum(len(batch) for batches in ranks for batch in batches) == COUNT
    assert torch.is_tensor(ranks[0][0].image_BCHW)
