"""Prefetching: the same batches in the same order, and a position that ignores the prefetched
batch.

On a CPU the side stream is no stream, so there this is the logic of being ahead. That copies are
complete when the compute stream reads them, only a GPU can show.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train_fakes as fakes
from torch import Tensor

from medvl.schema import Batch
from medvl.train.fault_tolerance import checkpoint
from medvl.train.loop import trainer
from medvl.train.parallel.distributed import BatchStream, SideStream, place, side_stream

CPU = torch.device("cpu")


class Watched(SideStream):
    """Notes what is sent and what is received."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device, channels_last=False)
        self.seen: list[tuple[str, str]] = []

    def send(self, batch: Batch) -> Batch:
        self.seen.append(("send", batch.keys[0]))
        return super().send(batch)

    def receive(self, batch: Batch) -> Batch:
        self.seen.append(("receive", batch.keys[0]))
        return super().receive(batch)


def steps_of(stream: BatchStream, steps: range) -> list[tuple[list[list[str]], dict[str, Any]]]:
    """The keys that each step takes, and the position after it."""
    return [([batch.keys for batch in stream.take(step)], stream.state_dict()) for step in steps]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_prefetching_keeps_batches_and_position(accumulate: int) -> None:
    plain, ahead = fakes.FakeLoader(20, 4), fakes.FakeLoader(20, 4)
    stream = BatchStream(ahead, accumulate, Watched())
    steps = range(2 * stream.steps_per_epoch)
    assert steps_of(stream, steps) == steps_of(BatchStream(plain, accumulate), steps)
    assert ahead.handed_out == plain.handed_out  # nothing beyond the end of the epoch


def test_prefetching_stops_at_the_end_of_an_epoch() -> None:
    loader, side = fakes.FakeLoader(20, 4), Watched()
    stream = BatchStream(loader, 1, side)
    for step, ahead in enumerate([2, 3, 4, 5, 5, 7, 8, 9, 10, 10]):
        ((key, *_),) = [batch.keys for batch in stream.take(step)]
        assert len(loader.handed_out) == ahead
        assert step % 5 == 0 or ("receive", key) in side.seen
    assert [kind for kind, _ in side.seen] == ["send", "receive"] * 8


def test_next_batch_is_sent_when_the_step_requests_it() -> None:
    side = Watched()
    batches = BatchStream(fakes.FakeLoader(20, 4), 2, side).take(0)
    next(batches)
    assert side.seen == []  # the step computes with the first one
    next(batches)
    assert [kind for kind, _ in side.seen] == ["send", "receive"]
    assert next(batches, None) is None
    assert [kind for kind, _ in side.seen] == ["send", "receive", "send"]


@pytest.mark.parametrize("taken", range(1, 7))
def test_resumed_stream_continues_after_the_last_batch_taken(taken: int) -> None:
    whole = steps_of(BatchStream(fakes.FakeLoader(20, 4), 1), range(10))
    stream = BatchStream(fakes.FakeLoader(20, 4), 1, Watched())
    position = steps_of(stream, range(taken))[-1][1]
    loader = fakes.FakeLoader(20, 4)
    loader.load_state_dict(position)
    assert steps_of(BatchStream(loader, 1, Watched()), range(taken, 10)) == whole[taken:]


def test_run_with_prefetching_equals_run_without(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of an epoch, too, with a batch on its way."""
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)

    def run(name: str, **settings: Any) -> None:
        settings = {
            "epochs": None,
            "checkpoint_every": 1,
            "keep_last": 20,
            "deterministic": True,
            **settings,
        }
        config = fakes.config(tmp_path / name, device=device.type, **settings)
        fakes.train(fakes.TwoTowers(), fakes.FakeLoader(20, 4), optim=fakes.optim(), config=config)

    monkeypatch.setattr(trainer, "side_stream", lambda device, channels_last: None)
    run("plain", steps=8)
    made: list[Watched] = []

    def watched(device: torch.device, channels_last: bool) -> Watched:
        made.append(Watched(device))
        return made[-1]

    monkeypatch.setattr(trainer, "side_stream", watched)
    run("ahead", steps=3)
    run("ahead", steps=8)
    assert [len(side.seen) for side in made] == [
        5,
        7,
    ]  # three sent and two received; then in two epochs
    assert fakes.records(tmp_path / "ahead") == fakes.records(tmp_path / "plain")
    assert fakes.weights_hash(tmp_path / "ahead") == fakes.weights_hash(tmp_path / "plain")
    for step in range(9):
        states = [
            checkpoint.read(tmp_path / name / "checkpoints" / f"step-{step:08d}").state["loader"]
            for name in ("ahead", "plain")
        ]
        assert states[0] == states[1]


def test_placing_a_placed_batch_copies_nothing() -> None:
    batch = fakes.make_batch([0, 1])
    batch.image_BCHW = batch.image_BCHW.expand(-1, 3, -1, -1)
    once = place(batch, CPU, channels_last=True)
    assert once.image_BCHW.is_contiguous(memory_format=torch.channels_last)
    again = place(once, CPU, channels_last=True)
    assert again.image_BCHW.data_ptr() == once.image_BCHW.data_ptr()
    assert torch.equal(again.image_BCHW, batch.image_BCHW)


def test_cpu_has_no_side_stream() -> None:
    assert side_stream(CPU, channels_last=False) is None


class Pinned(fakes.FakeLoader):
    """Batches in page-locked memory where there is a GPU, so that copies do not block the host."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield batch.pin_memory() if torch.cuda.is_available() else batch


class Late(SideStream):
    """Its copies begin about ten milliseconds late, so that who does not wait for them reads
    other bytes.
    """

    def send(self, batch: Batch) -> Batch:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(20_000_000)
        return super().send(batch)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_prefetched_batches_are_complete_on_a_busy_device(
    accumulate: int, device: torch.device
) -> None:
    """Each batch is summed at once, and again behind long products, when the host has long let
    go of it.
    """
    expected = [
        (int(batch.image_BCHW.sum()), int(batch.ids_BT.sum()))
        for batch in fakes.FakeLoader(4096, 512)
    ]
    size = 4096 if device.type == "cuda" else 64
    busy, sums = torch.randn(size, size, device=device), list[tuple[Tensor, Tensor]]()
    stream = BatchStream(Pinned(4096, 512), accumulate, Late(device, channels_last=True))
    for step in range(stream.steps_per_epoch):
        for batch in stream.take(step):
            batch = place(
                batch, device, channels_last=True
            )  # the first of an epoch; the others were sent
            sums.append((batch.image_BCHW.sum(), batch.ids_BT.sum()))
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            sums.append((batch.image_BCHW.sum(), batch.ids_BT.sum()))
    assert [(int(images), int(ids)) for images, ids in sums] == [
        each for each in expected for _ in range(2)
    ]
