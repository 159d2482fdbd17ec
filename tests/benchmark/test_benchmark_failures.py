"""The rule for processes of a benchmark that fail: what depends on them fails, the rest goes on,
the status is 1.
"""

import json
import sys
from pathlib import Path

import pytest

from medvl.benchmark import Plan, Store, execute, plan_runs, read_benchmark
from medvl.benchmark.settings import Run
from medvl.benchmark.store import FAILURE
from medvl.cli import benchmark as command
from medvl.cli.main import main

FILE = """
name = "four"
systems = ["convirt", "umrl", "vilt", "mgca"]
tasks = ["matching", "reranking", "zero-shot"]
[settings.umrl]
image_from = "run:convirt"
[settings.mgca]
init_from = "run:umrl"
model.text_encoder = "static"
[[corpora]]
name = "phantom"
root = "data"
"""
CHILD = """
import json, os, pathlib, signal, sys
folder, how, evaluations = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
if how:
    print("a traceback", "medvl: out of memory", sep="\\n")
    sys.exit(int(how))
cost = {"parameters": 1, "resumed": False, "wall_seconds": 1, "cpu_seconds": 1, "steps": 1, "pairs_per_second": None,
        "train_seconds": None, "peak_memory_gb": 1, "device": "CPU", "terms": []}
(folder / "cost.json").write_text(json.dumps(cost))
for name in evaluations:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "refusal.json").write_text(json.dumps({"reason": "left out", "failed": False}))
"""
"""A run without training. All runs write what a finished one does, but the first: it ends as the
argument names.
"""


class Benchmark:
    """A benchmark whose processes end as `endings` names: a status, a signal, or nothing for a
    finished run.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.out = folder / "benchmark.toml", folder / "out"
        self.file.write_text(FILE)
        self.plan: Plan = plan_runs(read_benchmark(self.file), self.out)
        self.store = Store(self.out)
        self.runs = {run.name: run for run in self.plan.runs}
        self.endings: dict[str, str] = {}
        self.started: list[str] = []
        monkeypatch.setattr(execute, "run_command_line", self._command_line)
        monkeypatch.setattr(command, "_make_data", lambda plan, store: None)

    def _command_line(self, folder: Path) -> list[str]:
        [run] = [run for run in self.plan.runs if self.store.folder(run) == folder]
        self.started.append(run.name)
        evaluations = [str(path.relative_to(folder)) for *_, path in self.store.evaluations(run)]
        return [
            sys.executable,
            "-c",
            CHILD,
            str(folder),
            self.endings.get(run.name, ""),
            *evaluations,
        ]

    def status(self, *options: str) -> int:
        """Return the exit status of `medvl benchmark`."""
        try:
            main(["benchmark", str(self.file), "--out", str(self.out), *options])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def states(self) -> dict[str, str]:
        """Return the state of each run by its name."""
        return {name: self.store.state(run) for name, run in self.runs.items()}

    def reason(self, name: str) -> str | None:
        """Return why a run failed."""
        return self.store.failure(self.runs[name])


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """MGCA starts from UMRL, which starts from ConVIRT, which proposes the candidates of ViLT."""
    found = Benchmark(tmp_path, monkeypatch)
    needs: dict[str, list[str]] = {name: sorted(run.needs) for name, run in found.runs.items()}
    assert {name: needs[name] for name in ("umrl", "mgca", "convirt")} == {
        "umrl": ["convirt"],
        "mgca": ["umrl"],
        "convirt": [],
    }
    assert "convirt" in needs["vilt"]
    return found


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize(
    ("ending", "reason"),
    [("1", "out of memory"), ("SIGKILL", "killed by SIGKILL (SIGKILL may be for lack of memory)")],
)
def test_runs_that_start_from_a_failed_one_fail_and_the_others_go_on(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str], ending: str, reason: str, jobs: str
) -> None:
    benchmark.endings["convirt"] = ending
    assert benchmark.status("--jobs", jobs) == 1
    assert benchmark.started == ["convirt", "vilt"]
    assert benchmark.states() == {
        "convirt": "failed",
        "umrl": "failed",
        "vilt": "finished",
        "mgca": "failed",
    }
    assert benchmark.reason("convirt") == reason
    assert benchmark.reason("umrl") == "the run of convirt failed"
    assert benchmark.reason("mgca") == "the run of umrl failed"
    printed = capsys.readouterr().out
    for name in ("convirt", "umrl", "mgca"):  # each once, and where to read more
        assert (
            printed.count(f"  failed: {benchmark.runs[name].title}: {benchmark.reason(name)}") == 1
        )
    assert f"(see {benchmark.store.folder(benchmark.runs['convirt']) / 'log.txt'})" in printed


def test_failed_runs_are_repeated_only_on_request(benchmark: Benchmark) -> None:
    benchmark.endings["convirt"] = "1"
    assert benchmark.status() == 1
    benchmark.endings.clear()
    benchmark.started.clear()
    assert benchmark.status() == 1
    assert benchmark.started == []
    assert benchmark.status("--retry-failed") == 0
    assert benchmark.started == ["convirt", "umrl", "mgca"]
    assert set(benchmark.states().values()) == {"finished"}
    assert benchmark.status() == 0


@pytest.mark.parametrize("ending", ["75", "SIGTERM", "0"])
def test_runs_that_were_stopped_or_belong_to_another_process_are_unfinished(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    benchmark.endings["convirt"] = ending
    assert benchmark.status() == 1
    assert benchmark.started == ["convirt"]  # the others need it
    assert set(benchmark.states().values()) == {"to do"}
    assert "4 of 4 runs are not finished; run the same command again" in capsys.readouterr().out
    benchmark.endings.clear()
    assert benchmark.status() == 0


def test_failure_that_a_process_records_is_kept(benchmark: Benchmark) -> None:
    """A training's own error is more precise than the last line of its log."""
    run: Run = benchmark.runs["convirt"]
    benchmark.store.write_runs(benchmark.plan)
    (benchmark.store.folder(run) / FAILURE).write_text(json.dumps({"error": "the loss is NaN"}))
    execute._record_end(run, benchmark.store, 1)
    assert benchmark.reason("convirt") == "the loss is NaN"
