"""Masked losses of an update: accumulated, on two ranks and with sharded weights as in one batch
on one process.
"""

from pathlib import Path

import pytest
import torch
from helpers import text_ranks
from helpers.text_shards import write_text_shards
from helpers.two_ranks import on_two_ranks
from safetensors.torch import load_file

from medvl.train.loop.step import Step


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_shards(tmp_path_factory.mktemp("text") / "out", documents=30).folder


def weights(
    shards: Path, out: Path, accumulate: int, optimizer: str = "sgd"
) -> dict[str, torch.Tensor]:
    out.mkdir()
    text_ranks.run(shards, out, accumulate, optimizer)
    tensors: dict[str, torch.Tensor] = load_file(out / "weights")
    return tensors


def test_accumulation_is_one_batch(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = weights(shards, tmp_path / "1", 1), weights(shards, tmp_path / "4", 4)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    monkeypatch.setattr(Step, "_with_counts", lambda self, step, batches, count: batches)
    naive = weights(shards, tmp_path / "naive", 4)
    assert max(float((naive[name] - tensor).abs().max()) for name, tensor in whole.items()) > 1e-4


@pytest.mark.slow
def test_two_ranks_are_one(shards: Path, tmp_path: Path) -> None:
    for optimizer, sharded in (("sgd", False), ("lamb", True)):
        whole, out = (
            weights(shards, tmp_path / f"whole {optimizer}", 1, optimizer),
            tmp_path / optimizer,
        )
        out.mkdir()
        on_two_ranks(text_ranks.run, shards, out, 2, optimizer, sharded, group=False)
        for name, tensor in load_file(out / "weights").items():
            torch.testing.assert_close(
                tensor, whole[name], atol=1e-4, rtol=1e-3, msg=f"{optimizer} {name}"
            )
