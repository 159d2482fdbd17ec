"""Ordinal AUCs of severity, against scikit-learn and on the phantom's grades."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import make_source
from sklearn.metrics import roc_auc_score

from medvl import phantom
from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval import linear_probe, ordinal_table
from medvl.eval.probing.features import FeatureTable
from medvl.eval.probing.protocol import parse_levels

LEVELS = ("none", "mild", "moderate", "severe")
NAMES = tuple(f"edema={level}" for level in sorted(LEVELS))


def graded(count: int, seed: int, prefix: str) -> tuple[FeatureTable, np.ndarray]:
    """Return features of which the first grows with the level, and the levels; every tenth image
    has none.
    """
    rng = np.random.default_rng(seed)
    level_N = rng.integers(0, 4, count)
    labels_NL = (
        np.array(NAMES) == np.array([f"edema={LEVELS[level]}" for level in level_N])[:, None]
    ).astype(float)
    labels_NL[::10] = np.nan
    level_N[::10] = -1
    x_ND = rng.normal(size=(count, 4))
    x_ND[:, 0] += 0.8 * level_N
    source = make_source(labels_NL, NAMES, patients=count // 2, prefix=prefix)
    samples, positions = tuple(source.samples), tuple(range(count))
    fields = {
        "samples": samples,
        "positions": positions,
        "unreadable": {},
        "fingerprint": prefix * 4,
    }
    table = FeatureTable(
        x_ND=torch.from_numpy(x_ND).float(), labels_NL=labels_NL, label_names=NAMES, **fields
    )
    return table, level_N


def test_labels_are_the_steps_of_the_scale() -> None:
    table, level_N = graded(40, 0, "a")
    steps = ordinal_table(table, "edema", LEVELS)
    assert steps.label_names == ("edema >= mild", "edema >= moderate", "edema >= severe")
    kept = np.flatnonzero(level_N >= 0)
    np.testing.assert_array_equal(steps.labels_NL, level_N[kept, None] >= [1, 2, 3])
    assert steps.positions == tuple(kept)
    assert torch.equal(steps.x_ND, table.x_ND[kept])
    twice = dataclasses.replace(table, labels_NL=np.ones_like(table.labels_NL))
    with raises(EvaluationError, "empty", "levels"):
        ordinal_table(twice, "edema", LEVELS)
    with raises(EvaluationError, "unknown_name", "levels"):
        ordinal_table(table, "edema", ("none", "grave"))


def test_probe_reports_ordinal_aucs_and_their_mean() -> None:
    parts = [
        graded(count, seed, name)
        for seed, (count, name) in enumerate(((300, "t"), (100, "v"), (120, "e")))
    ]
    tables = [ordinal_table(table, "edema", LEVELS) for table, _ in parts]
    result = linear_probe(*tables, fractions=(1.0,), resamples=20)
    rows = {row.target: row for row in result.results.rows if row.metric == "auroc@100%"}
    level_N = parts[2][1][parts[2][1] >= 0]
    values = []
    for step, name in enumerate(LEVELS[1:], 1):
        values.append(roc_auc_score(level_N >= step, result.images.scores_NL[:, step - 1]))
        assert rows[f"edema >= {name}"].value == pytest.approx(values[-1])
    assert rows["macro"].value == pytest.approx(np.mean(values))
    assert min(values) > 0.7


def test_phantom_grades_become_labels_of_shards(tmp_path: Path) -> None:
    phantom.write_chexpert(tmp_path, patients=30, size=48, seed=1, workers=1)
    (truth,) = tmp_path.rglob("phantom_truth.jsonl.gz")
    columns = [
        "--image-column",
        "path",
        "--patient-column",
        "subject_id",
        "--category-column",
        "edema_severity",
    ]
    arguments = [
        "--image-root",
        str(truth.parent.parent),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    cli.main(["shards", "table", "--table", str(truth), *columns, *arguments])
    source = ShardSource(tmp_path / "out" / "train")
    assert set(source.label_names) >= {"edema_severity=none", "edema_severity=mild"}
    assert all(
        sum(sample.labels.values()) == 1 for sample in map(source.sample, range(len(source)))
    )


@pytest.mark.parametrize("text", ["edema", "edema=", "edema=none", "edema=none,none", "=a,b"])
def test_levels_are_checked(text: str) -> None:
    assert parse_levels("edema_severity=none, mild") == ("edema_severity", ("none", "mild"))
    with raises(EvaluationError, "malformed", "levels"):
        parse_levels(text)
