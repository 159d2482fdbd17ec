"""Two ranks against one process: gather, DDP and complete runs."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forked, train_fakes as fakes, train_ranks as ranks
from helpers.train_ranks import CONTRASTIVE, COUNTS, OWN_ROWS, pairs, rows, weigh

from medvl.train.fault_tolerance import checkpoint
from medvl.train.parallel.distributed import join


@pytest.fixture(autouse=True)
def _fake_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)


def found(folder: Path, name: str) -> list[Any]:
    """What each rank wrote."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of two ranks for all checks that go on after one another."""
    target = tmp_path_factory.mktemp("ranks")
    names = (
        "gather",
        "losses",
        "ddp",
        "train",
        "nan",
        "disk",
        "disagree",
        "lock",
        "validate",
        "whole",
        "threads",
    )
    ranks.run_checks(target, *names)
    return target


@pytest.mark.parametrize(
    ("name", "counts"), [("uneven", COUNTS), ("even", (4, 4)), ("empty", (0, 8))]
)
def test_gather_equals_one_process_in_value_and_gradient(
    name: str, counts: tuple[int, int], folder: Path
) -> None:
    whole = rows().requires_grad_()
    weigh(whole).backward()
    assert whole.grad is not None
    for rank, result in enumerate(found(folder, "gather")):
        torch.testing.assert_close(torch.tensor(result[name]["value"], dtype=torch.float64), rows())
        # Both ranks compute the same loss, so the sum of what they ask of a row is twice what one
        # process asks.
        expected = 2 * whole.grad.split(list(counts))[rank]
        grad = torch.tensor(result[name]["grad"], dtype=torch.float64).reshape(expected.shape)
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-12)


def test_gather_of_other_dtypes_and_shapes(folder: Path) -> None:
    for rank, result in enumerate(found(folder, "gather")):
        assert result["flags"] == [False, True, True]
        assert result["numbers"] == [10, 11]
        assert result["regions"] == [4, 3, 4]
        assert result["alone"] == [rank + 1, 2]
        assert (
            f"rank {rank} has (2, {3 + rank}), rank {1 - rank} has (2, {4 - rank})"
            in result["error"]
        )


@pytest.mark.fault("N1")
@pytest.mark.parametrize("name", [*CONTRASTIVE, *OWN_ROWS])
def test_contrastive_losses_equal_those_of_one_process(name: str, folder: Path) -> None:
    """In value and gradient, from uneven batches; at temperature 0.01 too, and finite there."""
    image_NE, text_NE = (tensor.requires_grad_() for tensor in pairs())
    own = OWN_ROWS.get(name)
    value = own(image_NE, text_NE, slice(None)) if own else CONTRASTIVE[name](image_NE, text_NE)
    value.backward()
    for rank, result in enumerate(found(folder, "losses")):
        assert result[name]["value"] == pytest.approx(value.item(), rel=1e-6, abs=1e-6)
        for part, whole in (("image", image_NE), ("text", text_NE)):
            assert whole.grad is not None
            # Twice, as in the test above: DDP divides the sum over ranks by their number.
            expected = 2 * whole.grad.split(list(COUNTS))[rank]
            assert expected.isfinite().all()
            assert expected.abs().sum() > 0
            torch.testing.assert_close(
                torch.tensor(result[name][part]), expected, rtol=1e-5, atol=1e-7
            )


def test_ddp_gradients_equal_those_of_one_process(folder: Path) -> None:
    model = fakes.TwoTowers()
    losses = model(fakes.make_batch(list(range(sum(COUNTS)))))
    losses.total.backward()
    for result in found(folder, "ddp"):
        assert result["loss"] == pytest.approx(losses.total.item(), rel=1e-6)
        assert "logit_scale" in result["grads"]
        for name, parameter in model.named_parameters():
            grad = torch.tensor(result["grads"][name])
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_run_on_two_ranks_equals_run_on_one(folder: Path, tmp_path: Path) -> None:
    loader = fakes.FakeLoader(20, 4)

    def evaluator(model: torch.nn.Module) -> dict[str, float]:
        return {"score": float(model(fakes.make_batch([0, 1])).total)}

    alone = ranks.training(tmp_path / "alone", loader, evals=[evaluator])
    first, second = found(folder, "train")
    assert first["step"] == second["step"] == alone.step == 6
    assert [a + b for a, b in zip(first["keys"], second["keys"], strict=True)] == loader.handed_out
    for name, tensor in fakes.weights(tmp_path / "alone").items():
        torch.testing.assert_close(
            fakes.weights(folder / "train")[name], tensor, rtol=1e-4, atol=1e-5
        )
    assert first["metrics"] == second["metrics"] == pytest.approx(dict(alone.metrics), rel=1e-4)
    assert (first["called"], second["called"]) == (3, 0)  # evaluators run on rank 0 only
    ours, theirs = fakes.records(folder / "train"), fakes.records(tmp_path / "alone")
    assert [(row["kind"], row["step"]) for row in ours] == [
        (row["kind"], row["step"]) for row in theirs
    ]
    for our, their in zip(ours, theirs, strict=True):
        assert our.pop("kind") == their.pop("kind")
        assert our == pytest.approx(their, rel=1e-4)


@pytest.mark.fault("F14")
def test_infinite_loss_on_one_rank_is_skipped_on_both(folder: Path) -> None:
    first, second = found(folder, "nan")
    assert first["skipped"] == second["skipped"] == 1
    assert first["weights"] == second["weights"]
    assert torch.tensor(first["weights"]).isfinite().all()
    (skip,) = fakes.records(folder / "nan", "skip")
    assert len(skip["keys"]) == 2  # those of the one micro-batch, on the rank that had it


@pytest.mark.fault("F2")
def test_full_disk_on_rank_0_keeps_ranks_in_step(folder: Path) -> None:
    first, second = found(folder, "disk")
    assert first["step"] == second["step"] == 6
    assert first["failures"] == second["failures"] == 2
    assert second["saves"] == 0


def test_ranks_with_different_settings_are_refused(folder: Path) -> None:
    first, second = found(folder, "disagree")
    assert (
        first == "ranks 0 and 1 differ in settings; start all ranks with the same command and data"
    )
    assert (
        second == "ranks 1 and 0 differ in settings; start all ranks with the same command and data"
    )


@pytest.mark.fault("F19")
def test_locked_folder_stops_all_ranks(folder: Path) -> None:
    first, second = found(folder, "lock")
    assert "is in use by this process" in first
    assert second.startswith("rank 0 failed: TrainingError: ")
    assert "is in use by" in second


@pytest.mark.fault("F4")
def test_signal_to_one_rank_stops_both_and_resume_is_exact(folder: Path, tmp_path: Path) -> None:
    ranks.run_checks(tmp_path, "signal")
    assert not list(tmp_path.glob("signal-*.json"))  # train did not return, on either rank
    assert (tmp_path / "resume" / "last").readlink().name == "step-00000004"
    ranks.run_checks(tmp_path, "resume")
    assert found(tmp_path, "resume") == found(folder, "whole") == [12, 12]
    assert fakes.weights_hash(tmp_path / "resume") == fakes.weights_hash(folder / "whole")
    assert fakes.records(tmp_path / "resume") == fakes.records(folder / "whole")


def test_an_error_releases_the_process_group(tmp_path: Path) -> None:
    ranks.run_checks(tmp_path, "error")
    assert found(tmp_path, "error") == [
        [1, 0],
        [1, 0],
    ]  # the traceback keeps DDP, which holds no group any more


@pytest.mark.skipif(sys.platform != "linux", reason="frames of C++ are those of Linux")
def test_a_crash_in_a_library_names_its_place(tmp_path: Path) -> None:
    """A rank that once died of "double free or corruption" said nothing else."""
    ended = forked.run([sys.executable, "-c", "import os\nos.abort()"], cwd=tmp_path)
    assert ended.returncode == -signal.SIGABRT
    assert 'program.py", line 4' in ended.stderr
    assert ended.stderr.index("Fatal Python error: Aborted") < ended.stderr.index(
        "frame #0: c10::FatalSignalHandler"
    )


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="counts the threads of a process on Linux"
)
def test_runs_in_a_process_group_of_the_caller_leave_no_threads(folder: Path) -> None:
    """Each run has a process group for decisions, with threads and connections of its own."""
    for counts in found(folder, "threads"):
        assert len(set(counts)) == 1


def test_validation_loss_is_exact_on_any_number_of_ranks(folder: Path) -> None:
    with join("cpu") as world:
        alone = ranks.validate(world)
    assert found(folder, "validate") == [alone, alone]


@pytest.mark.fault("F9")
def test_resume_on_another_number_of_ranks_warns(tmp_path: Path) -> None:
    class Stop(fakes.FakeLoader):
        def change(self, batch: Any) -> Any:
            if (self.epoch, self.position) == (1, 4):
                raise KeyboardInterrupt
            return batch

    ranks.training(tmp_path / "whole", epochs=4)
    with pytest.raises(KeyboardInterrupt):
        ranks.training(tmp_path / "one", Stop(20, 4), checkpoint_every=1, epochs=4)
    ranks.run_checks(tmp_path, "more_ranks")
    for result in found(tmp_path, "more_ranks"):
        assert result["step"] == 12
        assert (
            "was written on 1 ranks, this run has 2: the batches are the same"
            in result["warnings"][0]
        )
    for name, tensor in fakes.weights(tmp_path / "whole").items():
        torch.testing.assert_close(
            fakes.weights(tmp_path / "one")[name], tensor, rtol=1e-4, atol=1e-5
        )
