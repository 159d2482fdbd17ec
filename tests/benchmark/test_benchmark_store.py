"""Store of a benchmark: damaged files and files of other versions are named, a cut-off line of
records is left out.
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises

from medvl.benchmark import Column, Plan, Store, plan_runs, read_benchmark
from medvl.benchmark.pages.rows import _measured, measure_systems
from medvl.benchmark.ranks import FILE, comparable, read_resamples, write_resamples
from medvl.benchmark.store import (
    _PROTOCOL_VERSIONS,
    COST,
    FAILURE,
    REFUSAL,
    RUN,
    SECONDS,
    is_evaluated,
    read_evaluation,
    read_records,
    read_run,
)
from medvl.errors import ConfigError, EvaluationError, MedvlError
from medvl.eval import (
    GeneratedReport,
    MetricRow,
    Results,
    evaluate_reports,
    matching as matching,
    write_results,
)
from medvl.eval.report_generation import protocol as report_generation
from medvl.eval.retrieval import image_text, rerank

BENCHMARK = """
name = "one"
systems = ["convirt"]
tasks = ["zero-shot"]
[[corpora]]
name = "phantom"
root = "data"
"""
MEASURED: dict[str, Any] = {
    "parameters": 7,
    "resumed": False,
    "wall_seconds": 2.0,
    "cpu_seconds": 3.0,
    "steps": 4,
    "device": "CPU",
    "pairs_per_second": None,
    "train_seconds": 1.5,
    "peak_memory_gb": 0.5,
    "terms": ["contrastive"],
}
RESULTS = Results(protocol="zero-shot", protocol_version=1, rows=(), config={}, inputs={})


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Plan, Store]:
    (tmp_path / "one.toml").write_text(BENCHMARK)
    plan, store = plan_runs(read_benchmark(tmp_path / "one.toml"), tmp_path), Store(tmp_path)
    store.write_runs(plan)
    return plan, store


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        (COST, "", "malformed"),
        (COST, json.dumps(MEASURED)[:40], "malformed"),
        (COST, json.dumps({"steps": 3}), "version"),
        (FAILURE, "{", "malformed"),
        (FAILURE, "[]", "version"),
        (f"TASK/{REFUSAL}", '{"why": "of another version"}', "version"),
        ("TASK/results.json", '{"results_version": 1, ', "malformed"),
        ("TASK/results.json", '{"results_version": 0}', "version"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    planned: tuple[Plan, Store], file: str, text: str, code: str
) -> None:
    plan, store = planned
    folder = store.evaluation(plan.runs[0], "trained", "zero-shot")
    path = (
        folder / file.removeprefix("TASK/")
        if file.startswith("TASK/")
        else store.folder(plan.runs[0]) / file
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with raises(MedvlError, code, "out", names=path.name):
        measure_systems(plan, store)
    assert path.read_text() == text


def test_costs_are_read_as_they_were_written(planned: tuple[Plan, Store]) -> None:
    plan, store = planned
    (store.folder(plan.runs[0]) / COST).write_text(json.dumps(MEASURED))
    cost = store.cost(plan.runs[0])
    assert cost is not None
    assert (cost.parameters, cost.pairs_per_second, cost.terms) == (7, None, ("contrastive",))


def test_a_run_of_another_version_is_named(planned: tuple[Plan, Store]) -> None:
    plan, store = planned
    path = store.folder(plan.runs[0]) / RUN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"later": 1}))
    with raises(ConfigError, "version", "out", names=str(path)):
        read_run(path.parent)
    store.write_runs(plan)
    assert read_run(path.parent) == plan.runs[0]


def test_an_evaluation_whose_results_were_removed_is_repeated(planned: tuple[Plan, Store]) -> None:
    plan, store = planned
    folder = store.evaluation(plan.runs[0], "trained", "zero-shot")
    write_results(RESULTS, folder, None)
    (folder / SECONDS).write_text("1.0")
    assert is_evaluated(folder)
    (folder / "results.json").unlink()
    assert (is_evaluated(folder), read_evaluation(folder)) == (False, None)


def test_damaged_resamples_are_named(tmp_path: Path) -> None:
    assert read_resamples(tmp_path, "auroc/macro") is None
    np.savez(
        tmp_path / FILE,
        names=np.array(["auroc/macro"]),
        values_RK=np.zeros((2, 1)),
        items=np.array("hash"),
    )
    found = read_resamples(tmp_path, "auroc/macro")
    assert found is not None
    assert found.values_R.tolist() == [0.0, 0.0]
    content = (tmp_path / FILE).read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"text"):
        (tmp_path / FILE).write_bytes(damaged)
        with raises(EvaluationError, "malformed", "out", names=FILE):
            read_resamples(tmp_path, "auroc/macro")


@pytest.mark.parametrize(("patients", "written"), [("aab", True), ("aaa", False)])
def test_a_single_patient_has_no_resamples_to_test_differences_with(
    tmp_path: Path, patients: str, written: bool
) -> None:
    """Its resamples are all the same: any difference would have an error of 0."""
    lines = [
        {"key": str(number), "patient": patient, "scores": {"own": number, "other": 1.5}}
        for number, patient in enumerate(patients)
    ]
    results = Results(
        protocol="image_text_matching", protocol_version=1, rows=(), config={}, inputs={}
    )
    write_results(results, tmp_path, lines)
    write_resamples(tmp_path, 10)
    assert (read_resamples(tmp_path, "above_other/all") is not None) == written


def test_reports_of_other_references_have_other_items(tmp_path: Path) -> None:
    """R2Gen and MedViLL write reports of the same images, compared with other sections of the
    reports.
    """
    hashes = []
    for number, reference in enumerate(
        ("No effusion.", "No effusion.", "No effusion. No acute disease.")
    ):
        reports = [
            GeneratedReport(
                key=patient, patient=patient, reference=reference, generated="Effusion."
            )
            for patient in "ab"
        ]
        result, folder = evaluate_reports(reports, resamples=2), tmp_path / str(number)
        write_results(result.results, folder, result.predictions())
        write_resamples(folder, 2)
        found = read_resamples(folder, "corpus_bleu_1/report")
        assert found is not None
        hashes.append(found.items)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_records(tmp_path) == [{"step": 1}, {"step": 2}]


def test_versions_of_protocols_are_those_of_the_evaluators() -> None:
    """An evaluation by an earlier version is repeated, and a command's is not compared with a
    later one.
    """
    versions = {"retrieval": image_text.PROTOCOL_VERSION, "reranking": rerank.PROTOCOL_VERSION}
    versions |= {"matching": matching.PROTOCOL_VERSION}
    assert versions | {"reports": report_generation.PROTOCOL_VERSION} == _PROTOCOL_VERSIONS


def test_results_of_two_versions_of_a_protocol_are_not_ranked(tmp_path: Path) -> None:
    row = MetricRow(metric="f1", target="all", value=0.7, low=0.6, high=0.8, n=9)
    old, new = (
        _measured(
            [(tmp_path, dataclasses.replace(RESULTS, protocol_version=version, rows=(row,)))],
            Column(title="F1", metric="f1", targets=("all",)),
        )
        for version in (1, 2)
    )
    assert comparable([old, old])
    assert not comparable([old, new])


def test_a_stored_run_is_found_again_after_its_system_got_a_setting(
    planned: tuple[Plan, Store], caplog: pytest.LogCaptureFixture
) -> None:
    """As from a version without the setting, whose hash of them was another one."""
    plan, store = planned
    [run] = plan.runs
    stored = json.loads((store.folder(run) / RUN).read_text())
    settings = stored["settings"]
    assert settings["model"].pop("mirror_weight") == 0
    folder = store.folder(run).rename(store.out / "runs/earlier")
    (folder / RUN).write_text(json.dumps({**stored, "key": "earlier"}))
    source = store.out / "one.toml"
    with caplog.at_level(logging.INFO):
        assert [one.key for one in plan_runs(read_benchmark(source), store.out).runs] == ["earlier"]
    assert "model.mirror_weight" in caplog.text
    changes = {"settings": {"convirt": {"model": {"mirror_weight": 0.5}}}}
    [other] = plan_runs(read_benchmark(source, changes), store.out).runs
    assert other.key != "earlier"
