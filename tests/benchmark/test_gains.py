"""Paired differences from the start weights and between starts, columns of baselines, tasks of
several commands.
"""

import dataclasses
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises

from medvl.benchmark import (
    BenchmarkConfig,
    Column,
    CommandTask,
    CorpusConfig,
    Plan,
    StartConfig,
    plan_runs,
    read_benchmark,
    tasks as commands,
)
from medvl.benchmark.pages.rows import Measurements, SystemRow, _over
from medvl.benchmark.pages.tables import (
    columns_table,
    empty_columns_table,
    gain_tables,
    rank_tables,
    ranks_of,
    unranked_table,
)
from medvl.benchmark.pages.write import label_sections, loss_section
from medvl.benchmark.ranks import Measured, Resampled
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import MetricRow, Results
from medvl.eval.html.page import Pictures
from medvl.eval.html.tables import Cell

RNG = np.random.default_rng(0)
SHARED = RNG.normal(0, 0.1, 500)
COLUMNS = {
    "probe": Column(title="probe", metric="auroc", targets=("macro",)),
    "alone": Column(
        title="alone", metric="accuracy", targets=("overall",), subgroup="baseline: question_only"
    ),
}


def row(
    name: str, start: str, weights: Any, value: float, noise: np.ndarray | None = None
) -> SystemRow:
    """A row whose probe has resampled values, unless there is no noise."""
    resampled = None if noise is None else Resampled("items", value + SHARED + noise)
    probe = Measured(values=(value,), errors=(0.1,), resampled=(resampled,))
    alone = Measured(values=(0.6,), errors=(0.1,), resampled=(None,))
    sets: dict[str, Any] = {"refused": {}, "failed": frozenset(), "waiting": frozenset()}
    return SystemRow(
        name=name,
        family="dual",
        corpus="ours",
        start=start,
        share=1.0,
        weights=weights,
        runs=(),
        metrics={"probe": probe, "alone": alone},
        costs=(),
        evaluation_seconds=0.0,
        **sets,
    )


def measurements(*rows: SystemRow) -> Measurements:
    starts = tuple(StartConfig(name=name) for name in dict.fromkeys(row.start for row in rows))
    config = BenchmarkConfig(name="b", corpora=(CorpusConfig(name="ours"),), starts=starts)
    plan = Plan(config=config, runs=(), left_out={})
    names = dict.fromkeys(COLUMNS, "probe")
    return Measurements(plan=plan, rows=rows, columns=COLUMNS, tasks=names, failures=())


def test_gains_are_paired_differences_from_the_start_weights_and_between_starts() -> None:
    own = RNG.normal(0, 0.01, 500)
    found = measurements(
        row("a", "random", "trained", 0.8, own),
        row("a", "random", "start", 0.6, 0 * own),
        row("a", "imagenet", "trained", 0.9),
        row("a", "imagenet", "start", 0.95),
    )
    within, other, between = gain_tables(found)
    assert [table.columns for table in (within, other, between)] == [
        ["system", "probe"]
    ] * 3  # without the baseline
    [[name, cell]] = within.rows
    assert isinstance(cell, Cell)
    assert (name, cell.text) == ("a", "+0.200")
    assert cell.interval == pytest.approx(
        (0.2 - 1.96 * own.std(ddof=1), 0.2, 0.2 + 1.96 * own.std(ddof=1))
    )
    [[_, cell]] = other.rows  # not paired: the errors add in squares
    assert isinstance(cell, Cell)
    assert cell.text == "-0.050"
    assert cell.interval == pytest.approx(
        (-0.05 - 1.96 * math.hypot(0.1, 0.1), -0.05, 0.2272), abs=1e-4
    )
    assert between.title == "What the start imagenet adds to random: ours"
    assert gain_tables(measurements(row("a", "random", "trained", 0.8))) == []


def test_systems_without_a_common_metric_have_no_gain() -> None:
    bare = dataclasses.replace(row("b", "random", "start", 0.6), metrics={})
    found = measurements(
        row("a", "random", "trained", 0.8),
        row("a", "random", "start", 0.6),
        row("b", "random", "trained", 0.8),
        bare,
    )
    [table] = gain_tables(found)
    [[name, cell]] = table.rows
    assert isinstance(cell, Cell)
    assert (name, cell.reference) == ("a", 0.0)


def test_columns_name_their_task_metric_and_direction() -> None:
    table = columns_table(measurements(row("a", "random", "trained", 0.8)))
    assert table.rows == [
        ["probe", "probe", "auroc", "macro", "higher"],
        ["alone", "probe", "accuracy", "overall, baseline: question_only", "–"],
    ]


def test_probes_of_several_shares_are_a_curve() -> None:
    """Also those of a command, such as a probe of another corpus."""
    measured = row("a", "random", "trained", 0.8).metrics["probe"]
    shares = ("1%", "10%", "100%")
    columns = {
        f"RSNA, {share}": Column(title=share, metric=f"auroc@{share}", targets=("macro",))
        for share in shares
    }
    one = dataclasses.replace(
        row("a", "random", "trained", 0.8), metrics=dict.fromkeys(columns, measured)
    )
    found = dataclasses.replace(
        measurements(one), columns=columns, tasks=dict.fromkeys(columns, "RSNA probe")
    )
    [section] = label_sections(found)
    assert isinstance(section, Pictures)
    assert [strip.title for strip in section.strips] == ["RSNA probe, AUROC"]
    assert label_sections(measurements(one)) == []


def test_captions_of_ranks_name_the_systems_that_are_paired() -> None:
    """Those of the same test items and references; all systems having resamples is not enough."""
    own = np.zeros(500)

    def caption(**items: str | None) -> str:
        rows = []
        for name, content in items.items():
            one = row(name, "random", "trained", 0.8, own)
            resampled = None if content is None else Resampled(content, 0.8 + SHARED)
            probe = dataclasses.replace(one.metrics["probe"], resampled=(resampled,))
            rows.append(dataclasses.replace(one, metrics={"probe": probe}))
        found = measurements(*rows)
        [table] = rank_tables(found, ("ours", "random"), found.rows, ranks_of(found, found.rows))
        return table.caption

    assert caption(a="x", b="x") == "Differences are paired over test items."
    assert caption(a="x", b="y").startswith("No differences are paired: ")
    assert "within: a, b. The others are not" in caption(a="x", b="x", c="y", d=None)


def test_means_over_different_classes_are_listed_and_not_ranked() -> None:
    rows = [row(name, "random", "trained", 0.8) for name in "abc"]
    for one, over in zip(rows, ("macro of CT, MR", "macro of CT", "macro of CT"), strict=True):
        metrics = {
            **one.metrics,
            "probe": dataclasses.replace(one.metrics["probe"], over=frozenset({over})),
        }
        rows[rows.index(one)] = dataclasses.replace(one, metrics=metrics)
    found = measurements(*rows, dataclasses.replace(rows[0], weights="start"))
    assert ranks_of(found, found.rows) == {}
    table = unranked_table(found, ("ours", "random"), found.rows)
    assert table is not None
    assert table.rows == [["probe", "a", "macro of CT, MR"], ["probe", "b, c", "macro of CT"]]
    assert unranked_table(found, ("ours", "random"), found.rows[1:3]) is None
    different = measurements(rows[0], dataclasses.replace(rows[1], name="a", weights="start"))
    assert [table.rows for table in gain_tables(different)] == [[["a", Cell(text="–")]]]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (
            {"metric": "aurok", "targets": ("macro",)},
            "mine: no metric 'aurok'; did you mean 'auroc'?",
        ),
        (
            {"metric": "auroc", "targets": ("macr",)},
            "mine: no target macr of auroc; did you mean 'macro'?",
        ),
        ({"metric": "auroc", "targets": ("macro",), "subgroup": "sex: "}, "'age: old'"),
        ({"metric": "auroc", "targets": ("macro",), "subgroup": "age: "}, None),
    ],
)
def test_a_column_that_no_result_has_is_named(column: dict[str, Any], reason: str | None) -> None:
    own = Column(title="own", **column)
    rows = {"mine": frozenset({("auroc", "macro", "age: old"), ("recall", "all", "")})}
    one = dataclasses.replace(row("a", "random", "trained", 0.8), results=rows)
    if reason is None:
        one = dataclasses.replace(one, metrics={"own": one.metrics["probe"]})
    found = measurements(one)
    command = CommandTask(name="mine", command="eval x", columns=(own,))
    plan = dataclasses.replace(
        found.plan, config=dataclasses.replace(found.plan.config, commands=(command,))
    )
    table = empty_columns_table(dataclasses.replace(found, plan=plan))
    assert (table is None) == (reason is None)
    assert table is None or str(reason) in str(table.rows[0][1])
    waiting = dataclasses.replace(one, results={}, metrics={})
    assert empty_columns_table(dataclasses.replace(found, plan=plan, rows=(waiting,))) is None


def test_a_mean_is_over_the_classes_that_have_a_value() -> None:
    values = {("auroc", "CT"): 0.7, ("auroc", "MR"): 0.8, ("auroc", "US"): math.nan, ("auroc",
        "macro"): 0.75,
              ("auroc", "macro_competition"): 0.7, ("auroc_sd", "macro"): 0.1, ("recall@1",
              "all"): 0.2}  # fmt: skip
    rows = {
        name: MetricRow(metric=name[0], target=name[1], value=value)
        for name, value in values.items()
    }
    gaps = {
        "CT": "sex: F - M",
        "MR": "sex: M - F",
        "macro": "sex: F - M",
    }  # the groups differ between classes
    rows |= {
        ("gap", name): MetricRow(metric="auroc_gap", target=name, subgroup=subgroup, value=0.1)
        for name, subgroup in gaps.items()
    }
    results = Results(
        protocol="zero_shot", protocol_version=1, rows=tuple(rows.values()), config={}, inputs={}
    )
    for name in (("auroc", "macro"), ("auroc_sd", "macro"), ("gap", "macro")):
        assert _over(results, rows[name]) == "macro of CT, MR"
    for name in (("auroc", "macro_competition"), ("recall@1", "all")):
        assert _over(results, rows[name]) == name[1]


def test_baselines_are_not_ranked() -> None:
    found = measurements(row("a", "random", "trained", 0.8), row("b", "random", "trained", 0.7))
    assert set(ranks_of(found, found.rows)) == {"probe"}


def test_commands_of_a_task_stop_at_a_failure_and_keep_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    config = read_benchmark("real-small", {"systems": ["convirt"]})
    plan = plan_runs(config, tmp_path)
    run, published = (run for run in plan.runs if run.corpus.name == "chest")
    assert (run.start, run.tokenizer) == ("random", run.corpus.tokenizer)
    assert (published.start, published.tokenizer) == ("weights", None)
    assert (run.settings["pretrained"], published.settings["pretrained"]) == (False, True)
    given = {
        "zero-shot",
        "retrieval",
        "probe",
        "grounding",
        *(command.name for command in config.commands if "chest" in command.corpora),
    }
    assert set(run.tasks) == given
    called_with, devices, status = [], [], 0

    def called(
        command: list[str], *, env: dict[str, str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        called_with.append(command[3:])
        devices.append(env.get("CUDA_VISIBLE_DEVICES"))
        if "segmentation" in command:
            (tmp_path / "results.json").touch()
        return subprocess.CompletedProcess(command, status, "", "medvl: no GPU [missing]")

    monkeypatch.setattr(commands.subprocess, "run", called)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    commands.run_command(run, tmp_path, "lungs", tmp_path)
    assert [command[:2] for command in called_with] == [
        ["train", "dense_transfer"],
        ["eval", "segmentation"],
    ]
    assert called_with[0][called_with[0].index("--train.run-dir") + 1] == str(tmp_path / "run")
    settings = {**run.settings, "train": {**run.settings["train"], "device": "cpu"}}
    on_cpu = dataclasses.replace(run, settings=settings)
    commands.run_command(on_cpu, tmp_path, "lungs", tmp_path)
    assert devices == ["3", "3", "", ""]
    called_with, status = [], 1
    with raises(EvaluationError, "missing", "lungs"):
        commands.run_command(run, tmp_path, "lungs", tmp_path)
    assert len(called_with) == 1
    further = {"prob": COLUMNS["probe"]}
    with raises(ConfigError, "unknown_name", "columns"):
        plan_runs(
            dataclasses.replace(
                config, columns={name: (column,) for name, column in further.items()}
            ),
            tmp_path,
        )


def test_losses_below_zero_have_a_plot_of_their_own(tmp_path: Path) -> None:
    """The bound of one system stretched the axis until all others were one line."""
    losses = {"clip": (4.0, 2.0), "mutual_info": (0.01, -1.0)}
    for name, values in losses.items():
        (tmp_path / name / "run").mkdir(parents=True)
        records = [
            {"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(values)
        ]
        (tmp_path / name / "run" / "metrics.jsonl").write_text(
            "\n".join(map(json.dumps, records)) + "\n"
        )
    runs: Any = [
        dataclasses.replace(row(name, "random", "trained", 0.5), runs=(name,)) for name in losses
    ]
    store: Any = SimpleNamespace(folder=lambda run: tmp_path / run)
    section = loss_section(measurements(*runs), store)
    assert section is not None
    assert [strip.title for strip in section.strips] == [
        "Dual-encoders",
        "Dual-encoders, losses that fall below zero",
    ]
