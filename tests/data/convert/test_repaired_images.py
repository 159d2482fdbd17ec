"""A conversion that stopped over its budget reads skipped images again once they can be read."""

from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.errors import BudgetError


@pytest.mark.parametrize("repair", ["added", "replaced", "moved", "none"])
def test_conversion_over_budget_resumes_with_repaired_images(
    tmp_path: Path, deid: Deidentifier, repair: str
) -> None:
    plan = make_plan(tmp_path / "images", bad={8: b"y"})
    whole, image = encode_png(textured(8, 40, 50)), tmp_path / "images/8.png"
    if repair in ("added", "moved"):
        image.unlink()
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=0)
    with raises(BudgetError, "budget", "max_skipped"):
        write_shards(plan, deid, run, OPTIONS)
    kept = (tmp_path / "out/train/lab-train-000000.tar").stat()
    if repair == "none":
        with raises(BudgetError, "budget", "max_skipped"):
            write_shards(plan, deid, run, OPTIONS)
        return
    if repair == "moved":
        plan = make_plan(tmp_path / "elsewhere")
    else:
        image.write_bytes(whole)
    manifest = write_shards(plan, deid, run, OPTIONS)["train"]
    assert (manifest.samples, manifest.skipped) == (12, {})
    assert (tmp_path / "out/train/lab-train-000000.tar").stat().st_mtime_ns == kept.st_mtime_ns
    write_shards(
        make_plan(tmp_path / "images2"), deid, ShardRun(out=tmp_path / "whole", workers=1), OPTIONS
    )
    assert contents(tmp_path / "out/train") == contents(tmp_path / "whole/train")


def test_a_path_that_messages_quote_does_not_count_as_moved(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = make_plan(tmp_path / "back\\slash")
    (tmp_path / "back\\slash/8.png").unlink()
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=0)
    with raises(BudgetError, "budget", "max_skipped"):
        write_shards(plan, deid, run, OPTIONS)
    notes = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out-private").rglob("lab-*.json")
    }
    assert notes
    with raises(BudgetError, "budget", "max_skipped"):
        write_shards(plan, deid, run, OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in notes} == notes
