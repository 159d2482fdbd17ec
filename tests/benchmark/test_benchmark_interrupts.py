"""Interruptions of a benchmark: Ctrl-C in a terminal, and between the files of an evaluation."""

import contextlib
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.benchmark_plans import write_plan
from helpers.errors import raises

from medvl.benchmark import CorpusConfig, Plan, Store, execute, execute_locally
from medvl.benchmark.config import MakeStep
from medvl.benchmark.plan import make_corpus, missing_steps
from medvl.benchmark.store import COST, Refusal, read_evaluation
from medvl.errors import CorpusError
from medvl.eval import Results

FILE = """
name = "one"
systems = ["convirt"]
tasks = ["zero-shot"]
[[corpora]]
name = "phantom"
root = "data"
"""
PRINT_BLOCKED = (
    "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
)


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Plan, Store]:
    return write_plan(tmp_path, FILE)


def test_processes_of_runs_do_not_receive_ctrl_c_themselves(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SIGTERM that follows would be their second signal, which ends a training without a
    checkpoint.
    """
    plan, store = planned
    monkeypatch.setattr(
        execute, "run_command_line", lambda folder: [sys.executable, "-c", PRINT_BLOCKED]
    )
    execute_locally(plan, store, report=lambda line: None)
    assert (store.folder(plan.runs[0]) / "log.txt").read_text() == "True\n"


def test_an_evaluation_is_done_when_its_last_file_is_written(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = planned
    run = plan.runs[0]
    folder = store.evaluation(run, "trained", "zero-shot")
    (store.folder(run) / COST).write_text("{}")
    results = Results(protocol="zero-shot", protocol_version=1, rows=(), config={}, inputs={})
    evaluated = SimpleNamespace(results=results, predictions=lambda: None)
    monkeypatch.setattr(execute, "evaluate_trial", lambda *_, **__: evaluated)
    endings: list[BaseException] = [
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, "No space left on device"),
    ]

    def write(folder: Path, resamples: int) -> None:
        if endings:
            raise endings.pop(0)

    monkeypatch.setattr(execute, "write_resamples", write)
    with pytest.raises(KeyboardInterrupt):
        execute.execute_run(store.folder(run))
    assert store.state(run) == "to do"
    execute.execute_run(store.folder(run))
    failed = read_evaluation(folder)
    assert isinstance(failed, Refusal)
    assert failed.failed
    store.clear_failures(run)
    assert store.state(run) == "to do"
    execute.execute_run(store.folder(run))
    assert isinstance(read_evaluation(folder), Results)
    assert store.state(run) == "finished"


@pytest.mark.parametrize(("ending", "kept"), [(SystemExit(0), True), (OSError("full"), False)])
def test_an_interrupted_fine_tuning_keeps_its_checkpoints(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch, ending: BaseException, kept: bool
) -> None:
    plan, store = planned
    run = plan.runs[0]
    checkpoints = store.evaluation(run, "trained", "zero-shot") / "run/checkpoints"
    (store.folder(run) / COST).write_text("{}")

    def evaluate(*_: Any, **__: Any) -> None:
        checkpoints.mkdir(parents=True)
        raise ending

    monkeypatch.setattr(execute, "evaluate_trial", evaluate)
    with contextlib.suppress(SystemExit):
        execute.execute_run(store.folder(run))
    assert checkpoints.exists() == kept


def test_a_step_that_was_stopped_is_made_again(tmp_path: Path) -> None:
    """What it creates may exist before its last command has ended, such as the best checkpoint
    of a training.
    """
    step = MakeStep(creates="best/config.json", run=("first", "second"))
    corpus = CorpusConfig(name="ours", root=str(tmp_path), make=(step,))
    ran: list[str] = []

    def run(arguments: Sequence[str]) -> None:
        ran.append(arguments[0])
        (tmp_path / "best").mkdir(exist_ok=True)
        (tmp_path / "best/config.json").touch()
        if ran == ["first"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_corpus(corpus, run)
    with raises(CorpusError, "not_found", "corpora.pairs"):  # made, and without shards
        make_corpus(corpus, run)
    assert ran == ["first", "first", "second"]
    assert missing_steps(corpus) == []
