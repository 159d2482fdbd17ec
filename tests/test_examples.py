"""The examples for other training libraries train, and save a model that loads."""

import re
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

import medvl
from medvl.data import Deidentifier, Plan, Record, ShardOptions, ShardRun, write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.schema import Sample

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs/pages/guides/training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 25 pairs: 17 to train, two batches of eight and one pair, and 8 to validate."""
    folder, rng, deid = (
        tmp_path_factory.mktemp("pairs"),
        np.random.default_rng(0),
        Deidentifier(b"0123456789abcdef"),
    )
    records = []
    for number in range(25):
        cv2.imwrite(str(folder / f"{number}.png"), rng.integers(0, 256, (48, 48), dtype=np.uint8))
        text = f"finding {'abc'[number % 3]} in zone {number % 8}"
        records.append(Record(Sample(
            key=f"k-{number}", corpus="pairs", split="train" if number < 17 else "validate",
            patient=deid.patient(number), study=f"s{number}", image=folder / f"{number}.png",
            sections={"impression": text},
        )))  # fmt: skip
    plan = Plan("pairs", records, (), RowCounts())
    write_shards(
        plan, deid, ShardRun(out=folder / "shards", workers=1), ShardOptions(short_side=48)
    )
    return folder / "shards"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains(
    path: Path,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip({"lightning_loop": "lightning", "accelerate_loop": "accelerate",
                         "huggingface_trainer": "accelerate"}.get(path.stem,
                         "torchmetrics"))  # fmt: skip
    arguments = ["--data", str(shards / "train"), "--out", str(tmp_path / "model"), "--epochs", "1"]
    arguments += ["--valid", str(shards / "validate")] if "--valid" in path.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "model")
    assert all(float(loss) > 0 for loss in re.findall(r"'loss': '?([0-9.]+)", printed)), (
        "a batch without negatives"
    )
    model = medvl.load(tmp_path / "model")
    assert model.provenance["recipe"] == path.stem
    assert [manifest.samples for manifest in medvl.models.train_manifests(tmp_path / "model")] == [
        17
    ]
    assert 0 < medvl.infer(model, shards.parent / "0.png", "finding a")["finding a"] < 1


def test_every_example_is_on_the_page() -> None:
    assert len(EXAMPLES) == 4
    assert all(f"examples/{path.name}" in PAGE for path in EXAMPLES)
