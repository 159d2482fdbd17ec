"""Parts of a conversion, and merging them to the bytes of one run."""

import dataclasses
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import forked
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.data.convert import merge, pipeline, plan as plan_module
from medvl.data.convert.merge import merge_parts
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.plan import Conversion, PrivateFolder
from medvl.data.convert.record import ShardNote, ShardTask
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.errors import ConfigError, ShardError, SplitError
from medvl.schema import Sample

OPTIONS = ShardOptions(short_side=32, samples_per_shard=3, image_format="png")
SPLITS = ("train", "train", "train", "validate", "test")


def make_plan(folder: Path, count: int = 40) -> Plan:
    """Return a plan with two images per patient in three splits; one is unreadable, one has no
    text.
    """
    folder.mkdir(exist_ok=True)
    records = []
    for number in range(count):
        path = folder / f"{number}.png"
        if not path.exists():
            path.write_bytes(b"no image" if number == 7 else encode_png(textured(number, 40, 50)))
        sample = Sample(
            key=f"key{(number * 17) % count:03d}",
            corpus="lab-x",
            split=SPLITS[number // 2 % 5],
            patient=f"patient{number // 2}",
            study=f"study{number // 2}",
            image=path,
            sections={"caption": "" if number == 4 else f"This is image {number}."},
            labels={"even": int(number % 2 == 0)},
        )
        records.append(Record(sample))
    return Plan(
        "lab-x",
        records,
        ("even",),
        RowCounts(read=count + 3, kept=count, excluded=Counter(view=3)),
        Counter(repaired=2),
    )


def make_parts(
    folder: Path, deid: Deidentifier, parts: int, plan: Plan | None = None
) -> list[Path]:
    plan = plan or make_plan(folder / "images")
    outs = []
    for number in range(1, parts + 1):
        outs.append(folder / "parts" / str(number))
        write_shards(
            plan,
            deid,
            ShardRun(out=outs[-1], workers=1, max_skipped=1, part=f"{number}/{parts}"),
            OPTIONS,
        )
    return outs


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_merged_parts_equal_one_run(tmp_path: Path, deid: Deidentifier, parts: int) -> None:
    """Including the private folder, also with more parts than shards."""
    whole = ShardRun(out=tmp_path / "whole", workers=1, max_skipped=1)
    expected = write_shards(make_plan(tmp_path / "images"), deid, whole, OPTIONS)
    folders = make_parts(tmp_path, deid, parts)
    assert not list((tmp_path / "parts").glob("*/*/manifest.json")), "a part has no manifest"
    assert merge_parts(tmp_path / "merged", folders[::-1]) == expected
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert contents(tmp_path / "merged-private") == contents(tmp_path / "whole-private")
    assert (tmp_path / "merged-private").stat().st_mode & 0o077 == 0
    for split in expected:
        assert verify_folder(tmp_path / "merged" / split).problems == ()
    assert len(ShardSource(tmp_path / "merged/train")) == expected["train"].samples


def test_parts_are_disjoint_and_of_equal_size(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images")
    folders = make_parts(tmp_path, deid, 3, plan)
    named = [{path.name for path in folder.rglob("*.tar")} for folder in folders]
    assert sum(map(len, named)) == len(set.union(*named)) == 14
    assert max(map(len, named)) - min(map(len, named)) <= 1
    sources = [
        (folder.with_name(folder.name + "-private") / "sources.tsv").read_text()
        for folder in folders
    ]
    keys = sorted(line.split("\t")[0] for text in sources for line in text.splitlines())
    assert keys == sorted(record.sample.key for record in plan.records)


def test_interrupted_part_resumes(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_parts(tmp_path, deid, 2)
    before = contents(tmp_path / "parts")
    victim = sorted(folders[1].rglob("*.tar"))[2]
    victim.unlink()
    with raises(ShardError, "missing", names="1 of 7 shards"):
        merge_parts(tmp_path / "merged", folders)
    built: list[str] = []
    original = pipeline.build_shard

    def build_and_record(task: ShardTask, tick: Callable[[], None]) -> ShardNote:
        built.append(task.name)
        return original(task, tick)

    monkeypatch.setattr(pipeline, "build_shard", build_and_record)
    make_parts(tmp_path, deid, 2)
    assert built == [victim.stem]
    assert contents(tmp_path / "parts") == before


def test_interrupted_merge_resumes(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_parts(tmp_path, deid, 2)
    original, seen = merge._link, [0]

    def stop(source: Path, target: Path) -> None:
        seen[0] += 1
        if seen[0] > 5:
            raise KeyboardInterrupt
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(merge, "_link", stop)
        with pytest.raises(KeyboardInterrupt):
            merge_parts(tmp_path / "merged", folders)
    assert not list((tmp_path / "merged").rglob("manifest.json"))
    merge_parts(tmp_path / "merged", folders)
    merge_parts(tmp_path / "merged", folders)  # a third time changes nothing
    write_shards(
        make_plan(tmp_path / "images"),
        deid,
        ShardRun(out=tmp_path / "whole", workers=1, max_skipped=1),
        OPTIONS,
    )
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_files_are_copied_where_links_fail(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_parts(tmp_path, deid, 2)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(merge.os, "link", refuse)
    merge_parts(tmp_path / "merged", folders)
    tars = list((tmp_path / "merged").rglob("*.tar"))
    assert len(tars) == 14
    assert all(path.stat().st_nlink == 1 for path in tars)


def test_missing_duplicate_and_foreign_parts_are_refused(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = make_plan(tmp_path / "images")
    folders = make_parts(tmp_path, deid, 3, plan)
    out = tmp_path / "merged"
    with raises(ConfigError, "missing", "parts"):
        merge_parts(out, [])
    with raises(ShardError, "missing", "parts", names="2/3"):
        merge_parts(out, [folders[0], folders[2]])
    shutil.copytree(folders[0], tmp_path / "again")
    shutil.copytree(folders[0].with_name("1-private"), tmp_path / "again-private")
    with raises(ShardError, "conflict", names="1/3"):
        merge_parts(out, [*folders, tmp_path / "again"])
    write_shards(plan, deid, ShardRun(out=tmp_path / "whole", workers=1, max_skipped=1), OPTIONS)
    with raises(ConfigError, "conflict", "part", names="whole"):
        merge_parts(out, [tmp_path / "whole"])
    with raises(ShardError, "not_found", names="plan.json"):
        merge_parts(out, [tmp_path / "images"])
    assert not out.exists()


def test_parts_of_different_conversions_are_refused(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path / "images")
    first, second = make_parts(tmp_path, deid, 2, plan)
    corrected = dataclasses.replace(plan, records=list(plan.records))
    corrected.records[0] = Record(dataclasses.replace(plan.records[0].sample, labels={"even": 0}))
    other_salt = Deidentifier(b"another salt of sufficient size!")
    for field, planned, hasher, options in (
        ("options", plan, deid, dataclasses.replace(OPTIONS, quality=90)),
        ("salt", plan, other_salt, OPTIONS),
        ("records", corrected, deid, OPTIONS),
    ):
        run = ShardRun(out=tmp_path / field, workers=1, max_skipped=1, part="2/2")
        write_shards(planned, hasher, run, options)
        with raises(ConfigError, "mismatch", field):
            merge_parts(tmp_path / "merged", [first, run.out])
    run = ShardRun(out=tmp_path / "third", workers=1, max_skipped=1, part="3/3")
    write_shards(plan, deid, run, OPTIONS)
    with raises(ConfigError, "mismatch", "number of parts"):
        merge_parts(tmp_path / "merged", [first, second, run.out])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    run = ShardRun(out=tmp_path / "older", workers=1, max_skipped=1, part="2/2")
    write_shards(plan, deid, run, OPTIONS)
    with raises(ConfigError, "mismatch", "packages"):
        merge_parts(tmp_path / "merged", [first, run.out])
    assert not (tmp_path / "merged").exists()


def test_damage_is_reported_with_its_part_and_can_be_repaired(
    tmp_path: Path, deid: Deidentifier
) -> None:
    folders = make_parts(tmp_path, deid, 2)
    victim = sorted(folders[0].rglob("*train*.tar"))[0]
    data = bytearray(victim.read_bytes())
    data[700] ^= 1
    victim.write_bytes(data)
    with raises(ShardError, "mismatch", names=f"remove {victim}"):
        merge_parts(tmp_path / "merged", folders)
    assert not list((tmp_path / "merged").rglob("manifest.json"))
    victim.unlink()
    make_parts(tmp_path, deid, 2)
    assert merge_parts(tmp_path / "merged", folders)["train"].samples == 23


def test_patients_in_two_splits_and_unlisted_tars_are_refused(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged folder is checked even if the parts were not."""
    plan = make_plan(tmp_path / "images")
    plan.records[1] = Record(dataclasses.replace(plan.records[1].sample, split="test"))
    monkeypatch.setattr(plan_module, "check_disjoint", lambda *_: None)
    folders = make_parts(tmp_path, deid, 2, plan)
    with raises(SplitError, "leak", names="1 in both"):
        merge_parts(tmp_path / "merged", folders)
    (tmp_path / "merged/train/other.tar").write_bytes(b"")
    with raises(ShardError, "mismatch", names="other.tar"):
        merge_parts(tmp_path / "merged", folders)


def test_another_part_in_the_same_folder_is_refused(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images")
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=1, part="1/2")
    write_shards(plan, deid, run, OPTIONS)
    with raises(ConfigError, "exists", "part"):
        write_shards(plan, deid, dataclasses.replace(run, part="2/2"), OPTIONS)
    (tmp_path / "out-private/plan.json").write_text('{"corpus"')
    with raises(ShardError, "malformed", names="plan.json"):
        write_shards(plan, deid, run, OPTIONS)
    with raises(ShardError, "malformed", names="plan.json"):
        Conversion.read(PrivateFolder(tmp_path / "out"))


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2"])
def test_malformed_part_is_refused(part: str, tmp_path: Path) -> None:
    with raises(ConfigError, "malformed", "part"):
        ShardRun(out=tmp_path, part=part)


def test_shards_and_merge_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    rows = ["image,patient,text"]
    rng = np.random.default_rng(0)
    for number in range(24):
        (tmp_path / f"images/{number}.png").write_bytes(
            encode_png(rng.integers(0, 256, (20, 20)).astype(np.uint8))
        )
        rows.append(f"images/{number}.png,p{number},Image {number}.")
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    shared = ["shards", "table", "--table", str(tmp_path / "rows.csv"), "--image-column", "image",
              "--patient-column", "patient", "--text-column", "text", "--samples-per-shard", "4",
              "--workers", "1"]  # fmt: skip
    for number in (1, 2):
        cli.main([*shared, "--out", str(tmp_path / f"parts/{number}"), "--part", f"{number}/2"])
    assert "medvl merge OUT PART" in capsys.readouterr().out
    folders = [
        str(path) for path in sorted((tmp_path / "parts").iterdir())
    ]  # like parts/* of a shell
    assert len(folders) == 4
    cli.main(["merge", str(tmp_path / "out"), *folders])
    assert "verified" in capsys.readouterr().out
    cli.main(["verify", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("intact") == 3
    cli.main([*shared, "--out", str(tmp_path / "whole")])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    merge = [sys.executable, "-m", "medvl", "merge", "--quiet", str(tmp_path / "x"), folders[0]]
    ended = forked.run(merge)
    assert (ended.returncode, ended.stderr) == (1, "medvl: missing parts: 2/2\n")
