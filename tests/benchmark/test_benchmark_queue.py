"""The order of a benchmark's runs, and runs that need one that failed."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.benchmark_plans import write_plan

from medvl.benchmark import Plan, Store, execute, execute_locally, queue, tasks
from medvl.benchmark.store import COST, FAILURE, Refusal, read_evaluation
from medvl.eval import Results

FILE = """
name = "three"
systems = ["convirt", "umrl", "vilt"]
tasks = ["matching", "reranking", "zero-shot"]
[settings.umrl]
image_from = "run:convirt"
[[corpora]]
name = "phantom"
root = "data"
"""


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Plan, Store]:
    """UMRL starts from ConVIRT, which proposes the candidates of ViLT; nothing is trained."""
    plan, store = write_plan(tmp_path, FILE)
    assert [run.name for run in plan.runs if "convirt" in run.needs] == ["umrl", "vilt"]
    return plan, store


@pytest.mark.parametrize(
    ("present", "executed", "failed"),
    [
        ((FAILURE,), ["vilt"], {"convirt", "umrl"}),
        ((FAILURE, COST), ["umrl", "vilt"], {"convirt"}),  # its evaluations failed
        ((), [], set()),
    ],
)
def test_a_run_fails_with_those_that_it_starts_from(
    planned: tuple[Plan, Store],
    monkeypatch: pytest.MonkeyPatch,
    present: tuple[str, ...],
    executed: list[str],
    failed: set[str],
) -> None:
    plan, store = planned
    names = {store.folder(run): run.name for run in plan.runs}
    [convirt] = [run for run in plan.runs if run.name == "convirt"]
    for name in present:
        (store.folder(convirt) / name).write_text('{"error": "out of memory"}')
    started: list[str] = []
    monkeypatch.setattr(queue, "execute_run", lambda folder: started.append(names[folder]))
    execute_locally(plan, store, jobs=0, report=lambda line: None)
    assert [name for name in started if name != "convirt"] == executed
    assert {run.name for run in plan.runs if store.state(run) == "failed"} == failed
    [umrl] = [run for run in plan.runs if run.name == "umrl"]
    assert store.failure(umrl) == ("the run of convirt failed" if "umrl" in failed else None)


def test_only_the_evaluation_with_candidates_of_a_failed_run_is_refused(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = planned
    convirt, vilt = (next(run for run in plan.runs if run.name == name) for name in ("convirt", "vilt"))
    (store.folder(convirt) / FAILURE).write_text('{"error": "out of memory"}')
    (store.folder(vilt) / COST).write_text("{}")
    results = Results(protocol="matching", protocol_version=1, rows=(), config={}, inputs={})
    evaluated = SimpleNamespace(results=results, predictions=lambda: None)
    matching = dataclasses.replace(tasks.TASKS["matching"], evaluate=lambda trained: evaluated)
    monkeypatch.setattr(execute, "TASKS", {**tasks.TASKS, "matching": matching})
    monkeypatch.setattr(execute, "write_resamples", lambda folder, resamples: None)
    execute.execute_run(store.folder(vilt))
    found = {task: read_evaluation(folder) for _, task, folder in store.evaluations(vilt)}
    assert isinstance(found["matching"], Results)
    assert found["reranking"] == Refusal("the run of convirt, which this one needs, failed", failed=True)
