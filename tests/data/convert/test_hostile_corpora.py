"""Links, pipes, devices and folders in the place of a corpus's files."""

import ast
import dataclasses
import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
from helpers.errors import assert_skipped, raises
from helpers.shard_plans import OPTIONS, make_plan, reseal

from medvl.cli import main as cli
from medvl.common.untrusted import InputFolders
from medvl.data import FileAccess
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.plan import ShardPlan
from medvl.data.corpora import table
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.corpora.questions import path_vqa, slake
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.corpora.table import TableColumns
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_from_json, sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.errors import CorpusError, ShardError
from medvl.schema import Sample

ROOT = Path(__file__).parents[3]


def sample(number: int, image: Path) -> Record:
    return Record(
        Sample(
            key=f"bad{number}",
            corpus="lab",
            split="train",
            patient=f"p{number}",
            study=f"s{number}",
            image=image,
            sections={"caption": "x"},
        )
    )


@pytest.mark.fault("S16")
def test_images_that_are_no_regular_files_are_skipped(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 6)
    folder, outside = tmp_path / "images", tmp_path / "outside.png"
    outside.write_bytes((folder / "0.png").read_bytes())
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "pipe.dcm")
    (folder / "folder.dcm").mkdir()
    for name, target in (("zero", "/dev/zero"), ("link", outside), ("loop", folder / "loop.png")):
        (folder / f"{name}.png").symlink_to(target)
    names = {
        "pipe.png": "not_a_file",
        "pipe.dcm": "not_a_file",
        "folder.dcm": "not_a_file",
        "zero.png": "outside_folder",
        "link.png": "outside_folder",
        "loop.png": "unreadable",
        f"{'x' * 300}.png": "unreadable",
        "0.png/1.png": "unreadable",
        "nul\0.png": "malformed",
        "byte\udcff.png": "image_missing",
    }
    records = [*plan.records, *(sample(number, folder / name) for number, name in enumerate(names))]
    plan = Plan("lab", records, plan.label_names, RowCounts(), folders=InputFolders.of(folder))
    manifest = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=99), OPTIONS
    )["train"]
    assert manifest.samples == 6
    assert dict(manifest.skipped_keys) == {
        f"bad{number}": reason for number, reason in enumerate(names.values())
    }
    assert len((tmp_path / "out-private/skipped.jsonl").read_text().splitlines()) == len(names)


@pytest.mark.fault("S16")
def test_a_linked_report_does_not_bring_other_texts_into_shards(
    mimic_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    secret = tmp_path / "salt"
    secret.write_text("FINDINGS: 0123456789abcdef\n")
    report = mimic_root / "files/p11/p11000001/s51000001.txt"
    report.unlink()
    report.symlink_to(secret)
    pipe = mimic_root / "files/p10/p10000764/s57375967.txt"
    pipe.unlink()
    os.mkfifo(pipe)
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=9)
    manifests = write_shards(mimic_cxr.MimicCXR(root=mimic_root).plan(deid), deid, run)
    assert manifests["validate"].skipped == manifests["test"].skipped == {"report_unreadable": 1}
    assert not any(
        b"0123456789abcdef" in path.read_bytes() for path in (tmp_path / "out").rglob("*.tar")
    )
    trusted = mimic_cxr.MimicCXR(root=mimic_root).plan(deid, FileAccess(follow_links=True))
    write_shards(trusted, deid, ShardRun(out=tmp_path / "trusted", workers=1, max_skipped=9))
    assert ShardSource(tmp_path / "trusted/validate").sample(0).sections == {
        "findings": "0123456789abcdef"
    }


@pytest.mark.fault("S16")
def test_trees_of_links_are_converted_with_follow_links(
    mimic_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree of links to a store elsewhere, as DataLad and caches of downloads make it, tables
    included.
    """
    tree = tmp_path / "tree"
    for path in mimic_root.rglob("*"):
        if path.is_file():
            link = tree / path.relative_to(mimic_root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    command = [
        "shards",
        "mimic-cxr",
        "--root",
        str(tree),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "--follow-links" in capsys.readouterr().err
    cli.main([*command, "--follow-links"])
    assert len(ShardSource(tmp_path / "out/train")) == 3


@pytest.mark.fault("S16")
def test_linked_tables_are_refused(mimic_root: Path, tmp_path: Path, deid: Deidentifier) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    metadata = next(mimic_root.glob("*-metadata.csv.gz"))
    metadata.rename(outside / metadata.name)
    metadata.symlink_to(outside / metadata.name)
    with raises(CorpusError, "outside_folder", names=metadata.name):
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid)
    assert mimic_cxr.MimicCXR(root=mimic_root).plan(deid, FileAccess(follow_links=True)).records
    (tmp_path / "slake").mkdir()
    (outside / "train.json").write_text("[]")
    (tmp_path / "slake/train.json").symlink_to(outside / "train.json")
    with raises(CorpusError, "outside_folder", names="train.json"):
        slake.SLAKE(root=tmp_path / "slake").plan(deid)


def write_table(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "t.jsonl"


COLUMNS = TableColumns(image_column="image", patient_column="patient", text_column=("text",))


@pytest.mark.fault("S17")
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a.png", "patient": "\ud800", "text": "x"}, "row_malformed"),
        ({"image": "a.png", "patient": "1", "text": "half \udead"}, "row_malformed"),
        ({"image": "a.png", "patient": "1", "text": "x" * (1 << 17) + "x"}, "cell_too_large"),
        ({"image": "../a.png", "patient": "1", "text": "x"}, "cell_malformed"),
    ],
)
def test_hostile_rows_are_skipped(
    tmp_path: Path, deid: Deidentifier, row: dict[str, object], reason: str
) -> None:
    assert_skipped(
        table.Table(table=write_table(tmp_path / "t", row), columns=COLUMNS).plan(deid),
        reason,
        names="t.jsonl, row 1: ",
    )


@pytest.mark.fault("S17")
@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"])
def test_endless_cells_and_lines_raise(tmp_path: Path, deid: Deidentifier, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / f"t.{suffix}"
    long = "x" * (20 << 20)
    if suffix == "parquet":
        columns = {"image": ["a.png"], "patient": ["1"], "text": [long]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        row = json.dumps({"image": "a.png", "patient": "1", "text": long})
        text = f"image,patient,text\na.png,1,{long}\n" if suffix.startswith("csv") else row
        path.write_bytes(
            gzip.compress(text.encode(), 1) if suffix.endswith("gz") else text.encode()
        )
    with raises(CorpusError, "too_large"):
        table.Table(table=path, columns=COLUMNS).plan(deid)


@pytest.mark.fault("S17")
def test_hostile_json_and_pickles_raise(tmp_path: Path, deid: Deidentifier) -> None:
    for name in ("train", "validate", "test"):
        (tmp_path / f"{name}.json").write_text("[" * 100_000)
    with raises(CorpusError, "malformed"):
        slake.SLAKE(root=tmp_path).plan(deid)
    path = write_table(tmp_path / "t")
    path.write_text("[" * 100_000)
    assert_skipped(table.Table(table=path, columns=COLUMNS).plan(deid), "row_malformed")
    for part in ("train", "val", "test"):
        (tmp_path / "qas" / part).mkdir(parents=True)
        (tmp_path / f"qas/{part}/{part}_qa.json").write_text(
            '[{"image": "a", "question": "b", "answer": "c"}]'
        )
    for row in (
        {"image": "\ud800", "question": "", "answer": ""},
        {"image": "a", "question": "b", "answer": 1 << 20000},
    ):
        (tmp_path / "qas/train/train_qa.pkl").write_bytes(pickle.dumps([row]))
        with raises(CorpusError, "malformed"):
            path_vqa.PathVQA(root=tmp_path).plan(deid)
    (tmp_path / "qas/train/train_qa.pkl").unlink()
    (tmp_path / "qas/train/train_qa.json").unlink()
    row = {"sent": "b", "label": {"yes": 1, "no": "x"}, "img_id": "a"}
    (tmp_path / "qas/train_vqa.json").write_text(json.dumps([row]))
    with raises(CorpusError, "wrong_type", "label"):
        path_vqa.PathVQA(root=tmp_path).plan(deid)


@pytest.mark.fault("S17")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("sections", value) for value in (["findings"], {"findings": ["a"]}, "text")),
        *(
            ("labels", value)
            for value in ({"Edema": 7}, {"Edema": "1"}, {"Edema": True}, ["Edema"])
        ),
        *(
            ("age", "40"),
            ("age", 4.5),
            ("view", 1),
            ("sex", ["F"]),
            ("patient", 5),
            ("key", None),
            ("extra", [1]),
        ),
    ],
)
def test_samples_with_fields_of_other_types_are_refused(
    tmp_path: Path, deid: Deidentifier, field: str, value: object
) -> None:
    """When they are planned, and when they are read."""
    plan = make_plan(tmp_path / "images", 2)
    content = json.loads(sample_to_json(plan.records[0].sample))
    with pytest.raises(ValueError, match=field):
        sample_from_json(json.dumps(content | {field: value}).encode())
    wrong = dataclasses.replace(plan.records[0].sample, **{field: value})
    with raises(ShardError, "wrong_type", field):
        ShardPlan(dataclasses.replace(plan, records=[Record(wrong)]), 5)


@pytest.mark.fault("S17")
def test_shards_with_fields_of_other_types_are_named(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 3)
    write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)
    folder = tmp_path / "out/train"
    tar = folder / "lab-train-000000.tar"
    data = tar.read_bytes()
    right, wrong = (
        b'"sections":{"caption":"This is image 1."}',
        b'"sections":["caption","This is image 1."]',
    )
    tar.write_bytes(data.replace(right, wrong))
    assert tar.read_bytes() != data
    reseal(folder, 0)
    (problem,) = verify_folder(folder).problems
    assert "key001" in problem
    assert "sections" in problem
    source = ShardSource(folder)
    with raises(ShardError, "malformed", names="key001"):
        source.sample(1)
    assert source.sample(2) == dataclasses.replace(plan.records[2].sample, image=None)


READERS = [
    *(ROOT / "medvl/data/corpora").glob("*/*.py"),
    *(ROOT / f"medvl/data/corpora/{name}.py" for name in ("table", "text", "concepts")),
    *(ROOT / f"medvl/data/corpora/{name}.py" for name in ("webdataset_tars", "parquet_files")),
    *(
        ROOT / f"medvl/data/{name}.py"
        for name in ("images/read", "dicom/reader", "reports/sections")
    ),
]


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.name)
def test_corpora_open_files_through_one_function(path: Path) -> None:
    """Readers of a corpus open files by `InputFolders.open` only, so that links and special
    files are checked.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            allowed = call in ("folders.open", "allowed.open", "ANYWHERE.open", "tarfile.open")
            name = call.rpartition(".")[2]
            assert allowed or name not in ("open", "read_text", "read_bytes", "memory_map"), (
                ast.unparse(node)
            )
