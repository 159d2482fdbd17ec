"""Result files and text tables."""

import dataclasses
import hashlib
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises

import medvl
from medvl.errors import EvaluationError
from medvl.eval import MetricRow, format_table, read_results, write_results
from medvl.eval.core.metric_rows import mean_metrics, measure, median_metric
from medvl.eval.core.metrics import bootstrap_indices
from medvl.eval.core.results import Results, checkpoint_sha256, package_versions

ROWS = (
    MetricRow(
        metric="auroc", target="Edema", value=0.8734, low=0.8121, high=0.921, n=100, n_positive=20
    ),
    MetricRow(metric="auroc", target="Edema", subgroup="sex: F", n=7, n_positive=1),
    MetricRow(metric="auroc", target="macro", value=0.7, low=0.6, high=0.8, n=120),
    MetricRow(metric="f1", target="Edema", value=0.5, n=100, n_positive=20),
    MetricRow(metric="median_rank", target="macro", value=12.5, low=10.0, high=140.25, n=120),
)


def make_results(**changes) -> Results:
    results = Results(
        protocol="zero_shot",
        protocol_version=1,
        rows=ROWS,
        config={"seed": 0, "ks": (1, 5)},
        inputs={"checkpoint": None, "prompts": "ab"},
        details={"thresholds": {"Edema": 0.25, "Fracture": math.nan}},
    )
    return dataclasses.replace(results, **changes)


def test_results_round_trip(tmp_path):
    (path,) = write_results(make_results(), tmp_path / "new" / "folder")
    for given in (path, path.parent, str(path)):
        back = read_results(given)
        assert repr(back.rows) == repr(ROWS)  # NaN differs from itself
        assert back.protocol == "zero_shot"
        assert back.inputs == {"checkpoint": None, "prompts": "ab"}
        assert back.details["thresholds"] == {"Edema": 0.25, "Fracture": None}
        assert back.packages["medvl"]
        assert back.packages["torch"]


def test_results_name_the_commit_of_a_checkout():
    root = Path(medvl.__file__).parents[1]
    if shutil.which("git") is None or not (root / ".git").exists():
        assert package_versions()["medvl"] == medvl.__version__
        return
    head = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    version, _, commit = package_versions()["medvl"].partition("+")
    assert version == medvl.__version__
    assert head.startswith(commit.removesuffix(".changed"))
    assert len(commit) >= 7


def test_results_file_is_strict_json(tmp_path):
    (path,) = write_results(make_results(), tmp_path)
    data = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert data["results_version"] == 1
    assert data["protocol"] == {"name": "zero_shot", "version": 1}
    assert [row["name"] for row in data["metrics"]][:2] == ["auroc/Edema", "auroc/Edema (sex: F)"]
    assert data["metrics"][1]["value"] is None


def test_failed_write_keeps_old_file_without_leftovers(tmp_path):
    write_results(make_results(), tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(TypeError):
        write_results(make_results(details={"bad": object()}), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before

    def breaking():
        yield {"key": "a"}
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        write_results(make_results(), tmp_path, breaking())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_failed_rename_removes_temporary_file(tmp_path):
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        write_results(make_results(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("{", "malformed", "JSONDecodeError"),
        ("[]", "malformed", "TypeError"),
        ("{}", "malformed", "KeyError: 'results_version'"),
        ('{"results_version": 99}', "version", "99"),
        (
            '{"results_version": 1, "protocol": {"name": "a", "version": 1}, "metrics": '
            '[{"metric": 1}]}',
            "malformed",
            "KeyError",
        ),
    ],
)
def test_read_results_rejects_invalid_files(tmp_path, text, code, cause):
    (tmp_path / "results.json").write_text(text)
    with raises(EvaluationError, code, names=cause) as caught:
        read_results(tmp_path)
    assert "results.json" in str(caught.value)


def test_missing_files_raise_not_found(tmp_path):
    with raises(EvaluationError, "not_found", names="results.json"):
        read_results(tmp_path)
    with raises(EvaluationError, "not_found", "checkpoint", names="model.safetensors"):
        checkpoint_sha256(tmp_path)


def test_checkpoint_hash_is_hash_of_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert (
        checkpoint_sha256(tmp_path) == checkpoint_sha256(tmp_path / "model.safetensors") == expected
    )


def test_format_table_aligns_columns_and_omits_empty_ones():
    assert format_table(ROWS) == "\n".join(
        [
            "                  n  positive                 auroc     f1         median rank",
            "macro           120            0.700 [0.600, 0.800]      -  12.5 [10.0, 140.2]",
            "Edema           100        20  0.873 [0.812, 0.921]  0.500                   -",
        ]  # means first; the subgroup has no value
    )
    assert format_table(ROWS[2:3]).splitlines()[0].split() == ["n", "auroc"]


def test_format_table_wraps_wide_tables():
    first, second = format_table(ROWS, width=60).split("\n\n")
    assert first.splitlines()[0].split() == ["n", "positive", "auroc", "f1"]
    assert second.splitlines()[0].split() == ["n", "positive", "median", "rank"]
    assert len(second.splitlines()) == 2, "only the mean has a rank"
    assert max(map(len, first.splitlines())) <= 60
    assert len(format_table(ROWS, width=1).split("\n\n")) == 3


def test_results_row_rejects_unknown_name():
    with raises(EvaluationError, "not_found", names="auroc/Edema (sex: M)"):
        make_results().row("auroc", "Edema", "sex: M")


def test_means_and_medians_match_loop():
    rng = np.random.default_rng(0)
    values_NK = rng.integers(0, 9, (40, 2)).astype(float)
    values_NK[:5, 1] = np.nan
    rows = measure(
        [
            mean_metrics("accuracy", values_NK, ["open", "closed"]),
            median_metric("median", values_NK[:, 0], "open"),
        ],
        40,
        resamples=30,
        seed=2,
    )
    drawn_RN = bootstrap_indices(40, 30, seed=2)
    plain = [
        (lambda x: x[:, 0].mean(), 40),
        (lambda x: np.nanmean(x[:, 1]), 35),
        (lambda x: np.median(x[:, 0]), 40),
    ]
    for row, (function, n) in zip(rows, plain, strict=True):
        loop = [function(values_NK[drawn]) for drawn in drawn_RN]
        assert row.n == n
        assert row.value == pytest.approx(function(values_NK))
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(loop, (2.5, 97.5))))
