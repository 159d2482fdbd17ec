"""Checkpoints that the ranks of a sharded run write in parts: the bits of gathered ones, resumed
by any number of ranks.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import forked, part_ranks, train_fakes as fakes
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

import medvl
from medvl.cli.main import main
from medvl.errors import CheckpointError, ConfigError
from medvl.eval.core.results import checkpoint_sha256
from medvl.models.checkpoint_folder import read_weights
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings on two ranks, then one process that resumes one of them."""
    target = tmp_path_factory.mktemp("parts")
    for rank, found in enumerate(on_two_ranks(part_ranks.checks, target, timeout=900)):
        (target / f"{rank}.json").write_text(json.dumps(found))
    part_ranks.run(target / "alone", part_ranks.towers(), epochs=2, **part_ranks.UNSHARDED)
    return target


def optimizer_of(run_dir: Path) -> dict[str, Tensor]:
    return dict(checkpoint.read(run_dir / "last").optimizer())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", ["towers", "norm", "convirt"])
def test_parts_hold_the_bits_of_a_gathered_checkpoint(kind: str, folder: Path) -> None:
    parts, gathered = folder / f"{kind} parts", folder / f"{kind} gathered"
    names = sorted(path.name for path in (parts / "last" / "weights").iterdir())
    assert [name[:11] for name in names] == ["shard-00001", "shard-00002"]
    assert not (parts / "last" / "model.safetensors").exists()
    assert_equal(read_weights(parts / "last"), load_file(gathered / "last" / "model.safetensors"))
    assert_equal(optimizer_of(parts), optimizer_of(gathered))
    sizes = [path.stat().st_size for path in (parts / "last" / "weights").iterdir()]
    assert max(sizes) < 0.8 * sum(sizes)


def test_resume_from_parts_is_exact(folder: Path) -> None:
    resumed, undisturbed = folder / "resumed", folder / "undisturbed"
    assert_equal(read_weights(resumed / "last"), read_weights(undisturbed / "last"))
    assert_equal(optimizer_of(resumed), optimizer_of(undisturbed))
    assert fakes.records(resumed) == fakes.records(undisturbed)


@pytest.mark.parametrize("name", ["alone", "ddp", "from gathered"])
def test_resume_across_ranks_and_kinds_of_checkpoints(name: str, folder: Path) -> None:
    """The run whose disk was full trained as long without interruption."""
    expected = read_weights(folder / "disk" / "last")
    for key, tensor in read_weights(folder / name / "last").items():
        assert torch.allclose(tensor, expected[key], rtol=1e-3, atol=1e-5), key


@pytest.mark.fault("F2")
def test_full_disk_of_one_rank_is_counted_on_all_and_saving_is_retried(folder: Path) -> None:
    for rank in (0, 1):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert found["disk"] == {"step": 4, "failures": 1, "last": "step-00000004"}
        assert found["kept"]  # the model that was given to train() has the final weights


def test_load_and_consolidate_read_parts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = folder / "convirt parts", tmp_path / "one"
    main(["consolidate", "--checkpoint", str(run_dir), "--out", str(out)])
    assert str(out) in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == (
        folder / "convirt gathered" / "last" / "model.safetensors"
    ).read_bytes()
    assert_equal(medvl.load(run_dir).state_dict(), medvl.load(out).state_dict())
    assert checkpoint_sha256(run_dir) != checkpoint_sha256(out)
    with raises(CheckpointError, "exists", "out"):
        medvl.models.consolidate(run_dir, out)


@pytest.mark.fault("F3")
@pytest.mark.parametrize("damage", ["missing", "truncated", "smaller"])
def test_damaged_parts_are_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "convirt parts" / "checkpoints", tmp_path / "checkpoints")
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    last = max((saved / "weights").iterdir())
    if damage == "missing":
        last.unlink()
    elif damage == "truncated":
        last.write_bytes(last.read_bytes()[:-9])
    else:
        save_file({"text.weight": torch.zeros(2)}, last)
    with raises(CheckpointError, "mismatch"):
        checkpoint.verify(saved)
    with raises(CheckpointError, "mismatch"):
        medvl.load(saved)
    (saved / "complete.json").unlink()  # as in a copy of the model alone
    with raises(CheckpointError, "missing", names="complete.json"):
        medvl.load(saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps({**config, "files": []})
    )  # the parts are checked without it too
    with raises(CheckpointError, "mismatch" if damage == "missing" else "malformed"):
        medvl.load(saved)
    with raises(CheckpointError, "missing"):
        medvl.models.consolidate(saved, tmp_path / "out")


def test_sharded_checkpoints_need_sharded_weights(tmp_path: Path) -> None:
    with raises(ConfigError, "conflict", "sharded_checkpoints"):
        TrainConfig(run_dir=tmp_path, steps=1, global_batch=4, sharded_checkpoints=True)


@pytest.mark.fault("F1")
@pytest.mark.slow
def test_kill_of_a_rank_during_a_write_in_parts_leaves_complete_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, part_ranks.__file__, str(tmp_path)]
    ended = forked.run(command, timeout=600)
    assert ended.returncode == 0, ended.stderr
    _, killed, _, same = ended.stdout.split()
    assert same == killed
    assert int(killed) == 3
