"""Ctrl-C in a benchmark: a terminal sends it to all processes, the first of which stops the others."""

import sys
from pathlib import Path

import pytest

from medvl.benchmark import Store, execute_locally, plan_runs, queue, read_benchmark

FILE = """
name = "one"
systems = ["convirt"]
tasks = ["zero-shot"]
[[corpora]]
name = "phantom"
root = "data"
"""
PRINT_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_processes_of_runs_do_not_receive_ctrl_c_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SIGTERM that follows would be their second signal, which ends a training without a checkpoint."""
    (tmp_path / "one.toml").write_text(FILE)
    plan, store = plan_runs(read_benchmark(tmp_path / "one.toml"), tmp_path), Store(tmp_path)
    store.write_runs(plan)
    monkeypatch.setattr(queue, "run_command_line", lambda folder: [sys.executable, "-c", PRINT_BLOCKED])
    execute_locally(plan, store, report=lambda line: None)
    assert (store.folder(plan.runs[0]) / "log.txt").read_text() == "True\n"
