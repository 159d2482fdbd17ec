"""The order of a benchmark's runs, and runs that need one that failed."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.benchmark_plans import write_plan
from helpers.errors import raises

from medvl.benchmark import Plan, Store, execute, execute_locally, tasks
from medvl.benchmark.execute import execute_with_ray, settings_of
from medvl.benchmark.store import COST, FAILURE, Refusal, read_evaluation
from medvl.errors import ConfigError
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
    monkeypatch.setattr(execute, "execute_run", lambda folder: started.append(names[folder]))
    execute_locally(plan, store, jobs=0, report=lambda line: None)
    assert [name for name in started if name != "convirt"] == executed
    assert {run.name for run in plan.runs if store.state(run) == "failed"} == failed
    [umrl] = [run for run in plan.runs if run.name == "umrl"]
    assert store.failure(umrl) == ("the run of convirt failed" if "umrl" in failed else None)


def test_only_the_evaluation_with_candidates_of_a_failed_run_is_refused(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = planned
    convirt, vilt = (
        next(run for run in plan.runs if run.name == name) for name in ("convirt", "vilt")
    )
    (store.folder(convirt) / FAILURE).write_text('{"error": "out of memory"}')
    (store.folder(vilt) / COST).write_text("{}")
    results = Results(protocol="matching", protocol_version=1, rows=(), config={}, inputs={})
    evaluated = SimpleNamespace(results=results, predictions=lambda: None)
    evaluate = execute.evaluate_trial
    monkeypatch.setattr(
        execute,
        "evaluate_trial",
        lambda run, task, **where: (
            evaluated if task == "matching" else evaluate(run, task, **where)
        ),
    )
    monkeypatch.setattr(execute, "write_resamples", lambda folder, resamples: None)
    execute.execute_run(store.folder(vilt))
    found = {task: read_evaluation(folder) for _, task, folder in store.evaluations(vilt)}
    assert isinstance(found["matching"], Results)
    assert found["reranking"] == Refusal(
        "the run of convirt, which this one needs, failed", failed=True
    )


def test_a_run_waits_for_those_that_it_needs(planned: tuple[Plan, Store]) -> None:
    """In a job array whose first wave was cancelled: it does not fail, and the same command
    executes it later.
    """
    plan, store = planned
    [umrl] = [run for run in plan.runs if run.name == "umrl"]
    with raises(ConfigError, "in_use", "needs", names="run of convirt"):
        execute.execute_run(store.folder(umrl))
    assert store.state(umrl) == "to do"


def test_candidates_of_other_weights_are_ranked_anew(planned: tuple[Plan, Store]) -> None:
    plan, store = planned
    [vilt] = [run for run in plan.runs if run.name == "vilt"]
    other = dataclasses.replace(vilt, needs={"convirt": "another"})
    paths = [
        [store.evaluation(run, "trained", task).name for task in vilt.tasks]
        for run in (vilt, other)
    ]
    assert [a == b for a, b in zip(*paths, strict=True)] == [
        task != "reranking" for task in vilt.tasks
    ]


def test_what_is_shown_of_a_command_is_no_part_of_its_results(tmp_path: Path) -> None:
    command = """
[[commands]]
name = "own"
command = "eval zero-shot --checkpoint {checkpoint} --data {pairs}/test --out {out}"
columns = [{ title = "TITLE", metric = "auroc", targets = ["macro"] }]
"""
    folders = []
    for title in ("first", "second"):
        text = FILE.replace('"matching", "reranking", "zero-shot"', '"own"') + command.replace(
            "TITLE", title
        )
        plan, store = write_plan(tmp_path, text)
        folders.append(store.evaluation(plan.runs[0], "trained", "own"))
    assert folders[0] == folders[1]


def test_recipes_whose_rate_depends_on_validation_keep_it(tmp_path: Path) -> None:
    """ConVIRT's published schedule waits for the validation loss; that of CLIP does not."""
    text = FILE.replace('"convirt", "umrl", "vilt"', '"convirt", "clip"').replace(
        "[settings.umrl]", 'preset = "paper"'
    )
    plan, store = write_plan(tmp_path, text.replace('image_from = "run:convirt"', ""))
    valid = {run.name: settings_of(run, store).data.valid for run in plan.runs}
    assert (valid["convirt"] is None, valid["clip"] is None) == (False, True)
    assert {settings_of(run, store).train.checkpoint_every for run in plan.runs} == {250}


def test_a_run_that_another_process_executes_does_not_fail_on_ray(
    planned: tuple[Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = planned
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda command, folder: folder),
        wait=lambda left: (left[:1], left[1:]),
        get=lambda ended: execute.IN_USE,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    execute_with_ray(plan, store, report=lambda line: None)
    assert {store.state(run) for run in plan.runs} == {"to do"}


@pytest.mark.parametrize(("name", "size"), [("medvill", 512), ("m3ae", 384)])
def test_questions_are_fine_tuned_at_a_size_that_the_system_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """The published 384 pixels; MedViLL, whose cells are numbered, at its own 512."""
    text = FILE.replace('"convirt", "umrl", "vilt"', f'"{name}"').replace(
        "[settings.umrl]", 'preset = "paper"'
    )
    text = text.replace('image_from = "run:convirt"', "").replace(
        '"matching", "reranking", "zero-shot"', '"questions"'
    )
    plan, _ = write_plan(tmp_path, text + 'questions = "vqa"\nquestions_valid = "vqa/validate"\n')
    given: list[int] = []

    def prepare(recipe: Any) -> None:
        given.append(recipe.data.image.size)
        raise KeyboardInterrupt

    recipe = SimpleNamespace(
        PRESETS=tasks.recipe_module(tasks.find_recipe("vqa_finetune")).PRESETS, prepare=prepare
    )
    monkeypatch.setattr(tasks, "recipe_module", lambda path: recipe)
    with pytest.raises(KeyboardInterrupt):
        tasks._finetune_for_questions(plan.runs[0], tmp_path, tmp_path / "run")
    assert given == [size]
