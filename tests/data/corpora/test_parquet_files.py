"""Parquet files with images inside, as on the Hugging Face hub."""

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.errors import assert_skipped, raises
from helpers.mimic_files import textured
from PIL import Image

from medvl.cli import main as cli
from medvl.data import FileAccess
from medvl.data.annotations import questions_of
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.figures.roco import ROCO
from medvl.data.corpora.parquet_files import ParquetColumns, ParquetFiles
from medvl.data.corpora.questions.vqa_rad import VQARAD
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.storage import store
from medvl.data.storage.tars import read_part
from medvl.errors import ConfigError, CorpusError, SplitError
from medvl.schema import FilePart

BYTES = pyarrow.binary()
STRUCT = pyarrow.struct([("bytes", BYTES), ("path", pyarrow.string())])
LARGE = pyarrow.struct([("bytes", pyarrow.large_binary()), ("path", pyarrow.large_string())])
CAPTIONS = ParquetColumns(text_column=("caption",))
QUESTIONS = ParquetColumns(question_column="question", answer_column="answer")


def image(number: int) -> bytes:
    return encode_png(textured(number, 40, 50))


def cell(number: int) -> dict[str, object]:
    return {"bytes": image(number), "path": f"{number:04d}.png"}


def write(
    path: Path, images: list[Any], kind: Any = STRUCT, *, group: int = 2, **columns: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"image": pyarrow.array(images, kind), "unread": images, **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


def planned(
    pattern: object, deid: Deidentifier, columns: ParquetColumns = CAPTIONS, **options: Any
) -> Plan:
    grouped = columns.group_column or columns.question_column
    corpus = ParquetFiles(
        files=(str(pattern),),
        columns=columns,
        **{"rows_are_patients": not grouped, **options},
    )
    folder = Path(str(pattern)).parent if Path(str(pattern)).parent.is_dir() else Path.cwd()
    return corpus.plan(deid, FileAccess(copies=folder / "out-private" / "copies"))


def encoded(image: Path | FilePart) -> bytes:
    return image.read_bytes() if isinstance(image, Path) else read_part(image)


def contents(plan: Plan) -> dict[bytes, dict[str, str]]:
    """Return image -> its sections."""
    return {
        read_part(record.sample.image): dict(record.sample.sections)
        for record in plan.records
        if isinstance(record.sample.image, FilePart)
    }


def stored(folder: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return each stored image and its sample."""
    found: dict[str, dict[str, bytes]] = {}
    for path in folder.rglob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                opened = tar.extractfile(member)
                assert opened is not None
                found.setdefault(key, {})[suffix] = opened.read()
    return [(parts["jpg"], json.loads(parts["json"])) for parts in found.values()]


def convert(*arguments: object) -> None:
    cli.main(["shards", "parquet", *map(str, arguments), "--workers", "1"])


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (STRUCT, cell),
        (LARGE, cell),
        (BYTES, image),
        (pyarrow.large_binary(), image),
        (pyarrow.list_(STRUCT), lambda number: [cell(number)]),
        (pyarrow.list_(BYTES), lambda number: [image(number)]),
    ],
    ids=["struct", "large struct", "bytes", "large bytes", "list of structs", "list of bytes"],
)
def test_images_in_every_form_are_read(
    kind: Any, wrap: Any, tmp_path: Path, deid: Deidentifier
) -> None:
    images = list(map(wrap, range(5)))
    write(tmp_path / "train-0.parquet", images, kind, caption=[f"Caption {n}." for n in range(5)])
    plan = planned(tmp_path / "*.parquet", deid)
    assert contents(plan) == {image(n): {"caption": f"Caption {n}."} for n in range(5)}
    assert {record.sample.split for record in plan.records} == {"train"}
    assert plan.warnings == {"rows_are_patients": 5}
    again = planned(tmp_path / "*.parquet", deid)
    assert list(again.records) == list(plan.records)


def test_images_of_a_list_are_one_study(tmp_path: Path, deid: Deidentifier) -> None:
    rows = [[cell(0), cell(1)], [cell(2), {"bytes": None, "path": "away.png"}], [], None]
    texts = {"findings": ["Clear lungs.", None, "a", "b"], "note": ["Normal.", "Effusion.", "", ""]}
    write(tmp_path / "val.parquet", rows, pyarrow.list_(STRUCT), **texts)
    columns = ParquetColumns(text_column=("findings", "impression=note"))
    plan = planned(tmp_path / "val.parquet", deid, columns)
    both = {"findings": "Clear lungs.", "impression": "Normal."}
    expected = {image(0): both, image(1): both, image(2): {"impression": "Effusion."}}
    assert contents(plan) == expected
    studies = Counter(record.sample.study for record in plan.records)
    assert sorted(studies.values()) == [1, 2]
    assert len({record.sample.patient for record in plan.records}) == 2
    assert {record.sample.split for record in plan.records} == {"validate"}
    assert (plan.rows.read, plan.rows.kept) == (4, 2)
    assert plan.rows.excluded == {"no_image": 2}
    assert plan.warnings["images_outside_of_file"] == 1


def test_bad_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [
        *map(cell, range(20)),
        None,
        {"bytes": None, "path": "away.png"},
        {"bytes": image(30)[:200], "path": "cut.png"},
        {"bytes": b"no image", "path": "text.png"},
    ]
    captions = [None, "  ", *(f"Caption {number}." for number in range(2, 24))]
    write(tmp_path / "test.parquet", images, caption=captions)
    out = tmp_path / "out"
    options = ("--files", tmp_path, "--text-column", "caption", "--rows-are-patients")
    convert(*options, "--max-skipped", "2", "--out", out)
    printed = capsys.readouterr().out
    assert "parquet: read 24 rows: kept 22, left out 2 (2 no_image)" in printed
    manifest = Manifest.read(out / "test")
    assert manifest.samples == 18
    assert manifest.excluded == {"no_text": 2}
    assert sum(manifest.skipped.values()) == 2
    assert manifest.warnings["rows_are_patients"] == 22
    assert {sample["sections"]["caption"] for _, sample in stored(out)} == {*captions[2:20]}
    assert not (tmp_path / "out-private" / "copies").exists()
    with pytest.raises(SystemExit):
        convert(*options, "--max-skipped", "1", "--out", tmp_path / "strict")
    assert "max-skipped" in capsys.readouterr().err


def test_groups_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.parquet", [cell(0)], caption=["Normal."])
    options = ("--files", tmp_path, "--text-column", "caption", "--out", tmp_path / "out")
    with pytest.raises(SystemExit):
        convert(*options)
    assert "--rows-are-patients" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
    with raises(ConfigError, "conflict", "rows_are_patients", names="--group-column"):
        ParquetFiles(
            files=("a.parquet",),
            columns=ParquetColumns(text_column=("caption",), group_column="article"),
            rows_are_patients=True,
        )
    with raises(ConfigError, "conflict", "rows_are_patients", names="images of questions"):
        ParquetFiles(files=("a.parquet",), columns=QUESTIONS, rows_are_patients=True)


def test_a_group_in_two_splits_is_refused(tmp_path: Path, deid: Deidentifier) -> None:
    articles = {"train-0.parquet": [7, 8], "train-1.parquet": [8, 9], "test-0.parquet": [9, 10]}
    for place, (name, groups) in enumerate(articles.items()):
        numbers = [2 * place, 2 * place + 1]
        captions = [f"Caption {number}." for number in numbers]
        write(tmp_path / name, list(map(cell, numbers)), caption=captions, article=groups)
    columns = ParquetColumns(text_column=("caption",), group_column="article")
    train = planned(tmp_path / "train-*.parquet", deid, columns)
    assert Counter(record.sample.patient for record in train.records) == {
        deid.patient(str(group)): count for group, count in ((7, 1), (8, 2), (9, 1))
    }
    run = ShardRun(out=tmp_path / "out", workers=1)
    with raises(SplitError, "leak"):
        write_shards(planned(tmp_path / "*.parquet", deid, columns), deid, run)
    fractions = ("train=0.5", "test=0.5")
    anew = planned(tmp_path / "*.parquet", deid, columns, splits=fractions)
    splits: dict[str, set[str]] = {}
    for record in anew.records:
        splits.setdefault(record.sample.patient, set()).add(record.sample.split)
    assert all(len(found) == 1 for found in splits.values())


def test_empty_group_and_invalid_label_are_skipped(tmp_path: Path, deid: Deidentifier) -> None:
    cells = {"article": ["a", None, "c"], "edema": [1, 0, 7], "modality": ["CT", "CT", "CT"]}
    write(tmp_path / "train.parquet", list(map(cell, range(3))), **cells)
    columns = ParquetColumns(
        label_column=("edema",), group_column="article", extra_column=("modality",)
    )
    plan = planned(tmp_path / "train.parquet", deid, columns)
    assert_skipped(plan, "cell_missing", "cell_malformed", names="row 3")
    (record,) = plan.records
    assert (record.sample.labels, record.sample.extra) == ({"edema": 1}, {"modality": "CT"})
    selected = planned(tmp_path / "train.parquet", deid, columns, where=("edema=1",))
    assert selected.rows.excluded == {"where": 2}


def test_texts_in_every_form_are_read(tmp_path: Path, deid: Deidentifier) -> None:
    texts = {
        "large": pyarrow.array(["One."], pyarrow.large_string()),
        "shared": pyarrow.array(["Two."]).dictionary_encode(),
        "several": pyarrow.array([["Three", None, "Four."]]),
        "null": pyarrow.array([None]),
    }
    write(tmp_path / "train.parquet", [cell(0)], **texts)
    plan = planned(tmp_path / "train.parquet", deid, ParquetColumns(text_column=tuple(texts)))
    (record,) = plan.records
    assert record.sample.sections == {"large": "One.", "shared": "Two.", "several": "Three. Four."}


def test_equal_images_become_one_sample_with_questions(tmp_path: Path, deid: Deidentifier) -> None:
    def questions(name: str, numbers: list[int]) -> None:
        cells = {
            "question": [f"Is it {number}?" for number in range(len(numbers))],
            "answer": ["yes", "Left lung", None][: len(numbers)],
        }
        write(tmp_path / f"{name}.parquet", list(map(cell, numbers)), **cells)

    questions("train-00000-of-00001", [0, 1, 0])
    questions("validation-00000-of-00001", [2])
    plan = planned(tmp_path / "*.parquet", deid, QUESTIONS)
    asked = {
        read_part(record.sample.image): (record.sample.split, questions_of(record.sample))
        for record in plan.records
        if isinstance(record.sample.image, FilePart)
    }
    assert {data: split for data, (split, _) in asked.items()} == {
        image(0): "train",
        image(1): "train",
        image(2): "validate",
    }
    assert [(q.id, q.question, q.answer, q.answer_type) for q in asked[image(0)][1]] == [
        ("train-1", "Is it 0?", "yes", "closed"),
        ("train-3", "Is it 2?", "", "open"),
    ]
    assert (plan.rows.read, plan.rows.kept, plan.warnings["no_answer"]) == (4, 4, 1)
    questions("test-00000-of-00001", [0])
    mixed = planned(tmp_path / "*.parquet", deid, QUESTIONS)
    assert {record.sample.split for record in mixed.records} == {"mixed"}
    assert [len(questions_of(record.sample)) for record in mixed.records] == [3, 1, 1]


def test_options_of_questions_lose_their_letters(tmp_path: Path, deid: Deidentifier) -> None:
    options = [["A. left", "B. right"], ["left", "right"], ["A. left", "B. left"]]
    cells = {"question": ["Where?"] * 3, "answer": ["B", "Left", "A"], "options": options}
    write(tmp_path / "test.parquet", list(map(cell, range(3))), type=["side"] * 3, **cells)
    columns = dataclasses.replace(QUESTIONS, options_column="options", kind_column="type")
    plan = planned(tmp_path / "test.parquet", deid, columns)
    found = [question for record in plan.records for question in questions_of(record.sample)]
    assert [(q.answer, q.options, q.right, q.kind, q.answer_type) for q in found] == [
        ("right", ("left", "right"), (1,), "side", "closed"),
        ("left", ("left", "right"), (0,), "side", "closed"),
    ]
    assert plan.rows.skipped == {"cell_options": 1}
    with raises(CorpusError, "wrong_type", "unread"):
        wrong = dataclasses.replace(columns, options_column="unread")
        planned(tmp_path / "test.parquet", deid, wrong)


def test_patients_of_questions_are_in_one_split(tmp_path: Path, deid: Deidentifier) -> None:
    for number, name in enumerate(("train", "test")):
        cells = {"question": ["Is it?"], "answer": ["yes"], "patient": [5]}
        write(tmp_path / f"{name}.parquet", [cell(number)], **cells)
    columns = ParquetColumns(
        question_column="question", answer_column="answer", group_column="patient"
    )
    plan = planned(tmp_path / "train.parquet", deid, columns)
    assert [record.sample.patient for record in plan.records] == [deid.patient("5")]
    with raises(SplitError, "leak"):
        planned(tmp_path / "*.parquet", deid, columns)


def test_equal_images_of_captions_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    for name, numbers in (("train", [0, 1, 1]), ("test", [0, 2, 3])):
        captions = [f"Caption {number}." for number in numbers]
        write(tmp_path / f"{name}.parquet", list(map(cell, numbers)), caption=captions)
    plan = planned(tmp_path / "*.parquet", deid)
    assert len(plan.records) == 6
    assert plan.warnings["repeated_images"] == 2
    assert plan.warnings["images_in_other_splits"] == 1


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00003", "train"),
        ("val-00000-of-00001", "validate"),
        ("valid", "validate"),
        ("validation/0000", "validate"),
        ("data_test", "test"),
        ("test/part-3", "test"),
    ],
)
def test_splits_come_from_file_names(
    name: str, split: str, tmp_path: Path, deid: Deidentifier
) -> None:
    path = write(tmp_path / f"{name}.parquet", [cell(0)], caption=["Normal."])
    (record,) = planned(path, deid).records
    assert record.sample.split == split
    (record,) = planned(path, deid, split="gold").records
    assert record.sample.split == "gold"


def test_splits_come_from_a_column(tmp_path: Path, deid: Deidentifier) -> None:
    names = ["train", "valid", "gold"]
    write(tmp_path / "rows.parquet", list(map(cell, range(3))), caption=names, part=names)
    columns = ParquetColumns(text_column=("caption",), split_column="part")
    plan = planned(tmp_path / "rows.parquet", deid, columns)
    assert [record.sample.split for record in plan.records] == ["train", "validate", "gold"]
    for options in ({"split": "test"}, {"splits": ("train=1",)}):
        with raises(ConfigError, "conflict", "split"):
            planned(tmp_path / "rows.parquet", deid, columns, **options)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path, deid: Deidentifier) -> None:
    path = write(tmp_path / "train.parquet", [cell(0)], caption=["a"], number=[1], lists=[[1]])
    with raises(CorpusError, "missing", "text"):
        planned(path, deid, ParquetColumns(text_column=("text",)))
    with raises(CorpusError, "wrong_type", "number"):
        planned(path, deid, ParquetColumns(text_column=("number",)))
    with raises(CorpusError, "wrong_type", "caption", names="medvl shards table"):
        planned(path, deid, ParquetColumns(image_column="caption", text_column=("caption",)))
    with raises(CorpusError, "wrong_type", "lists"):
        planned(path, deid, ParquetColumns(text_column=("caption",), group_column="lists"))
    with raises(CorpusError, "not_found", "files"):
        planned(tmp_path / "absent-*.parquet", deid)
    for name in ("rows", "train-test"):
        other = write(tmp_path / f"other/{name}.parquet", [cell(0)], caption=["a"])
        with raises(ConfigError, "missing", "split", names="--split"):
            planned(other, deid)
        other.unlink()
    write(tmp_path / "other/train.parquet", [cell(0)], caption=["a"])
    with raises(ConfigError, "conflict", "files"):
        planned(tmp_path / "**/*.parquet", deid)
    path.write_bytes(path.read_bytes()[:-20])
    with raises(CorpusError, "malformed"):
        planned(path, deid)
    with raises(ConfigError, "missing", "answer_column"):
        ParquetColumns(question_column="question")
    with raises(ConfigError, "missing", "text_column"):
        ParquetColumns()
    with raises(ConfigError, "conflict", "question_column"):
        ParquetColumns(question_column="q", answer_column="a", text_column=("caption",))


def test_hub_addresses_are_read(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system in memory; the addresses of the hub are those of fsspec."""
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        path = tmp_path / f"{name}.parquet"
        write(path, [cell(len(name))], caption=[f"Caption of {name}."])
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(store, "_filesystem", lambda url: (files, f"/{url.partition('://')[2]}"))
    files.put(str(tmp_path / "*.parquet"), "/datasets/lab/figures@v1/data/")
    local = planned(tmp_path / "*.parquet", deid)
    for address in ("*.parquet", "", "t*-00000-of-00001.parquet"):
        plan = planned(f"hf://datasets/lab/figures@v1/data/{address}", deid)
        samples = [record.sample for record in plan.records]
        assert [(each.key, each.split, each.sections) for each in samples] == [
            (each.sample.key, each.sample.split, each.sample.sections) for each in local.records
        ]
        assert contents(plan) == contents(local)
    with raises(CorpusError, "not_found", "files"):
        planned("hf://datasets/lab/figures@v1/data/absent.parquet", deid)


def test_missing_package_of_an_address_is_named(
    deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.PACKAGES, "hf", "no_such_package")
    monkeypatch.setattr(store, "_opened", {})
    with raises(ConfigError, "missing", "address", names="medvl[remote]"):
        planned("hf://datasets/lab/figures/data/train.parquet", deid)


def test_parts_and_repetitions_have_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = [f"Caption {number}." for number in range(12)]
    write(tmp_path / "data/train.parquet", list(map(cell, range(12))), caption=captions)
    salt = tmp_path / "salt"
    options = ("--files", tmp_path / "data", "--text-column", "caption", "--rows-are-patients")
    options = (*options, "--samples-per-shard", "3", "--salt-file", salt)
    convert(*options, "--new-salt", "--out", tmp_path / "whole")
    tars = {path.name: path.read_bytes() for path in (tmp_path / "whole").rglob("*.tar")}
    assert len(tars) == 4
    convert(*options, "--out", tmp_path / "whole")
    parts = [tmp_path / f"part-{number}" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        convert(*options, "--part", f"{number}/2", "--out", part)
    cli.main(["merge", str(tmp_path / "merged"), *map(str, parts)])
    for folder in ("whole", "merged"):
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*.tar")} == tars


def as_parquet(plan: Plan, folder: Path, columns: Any) -> None:
    """Write the samples of a corpus as the hub has them: one file for each split."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in plan.records:
        assert isinstance(record.sample.image, Path)
        data = {"bytes": record.sample.image.read_bytes(), "path": record.sample.image.name}
        for split, cells in columns(record.sample):
            rows.setdefault(split, []).append({"image": data, **cells})
    folder.mkdir()
    for split, entries in rows.items():
        table = pyarrow.Table.from_pylist(entries)
        path = folder / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=7)


def test_figures_of_the_phantom_are_the_same_samples(tmp_path: Path, deid: Deidentifier) -> None:
    root = tmp_path / "roco"
    cli.main(["phantom", "roco", "--out", str(root), "--patients", "12", "--size", "64"])
    own = ROCO(root=root, splits="repaired").plan(deid)
    as_parquet(
        own,
        tmp_path / "hub",
        lambda each: [
            (each.split, {"article": each.patient, "caption": each.sections.get("caption")})
        ],
    )
    columns = ParquetColumns(text_column=("caption",), group_column="article")
    plan = planned(tmp_path / "hub/*.parquet", deid, columns)
    options = ShardOptions(short_side=64)
    for name, each in (("own", own), ("parquet", plan)):
        run = ShardRun(out=tmp_path / name, workers=1, max_skipped=20)
        write_shards(each, deid, run, options)
    one, other = (
        Counter(
            (data, sample["split"][:5], sample["sections"]["caption"])  # valid: two names
            for data, sample in stored(tmp_path / name)
        )
        for name in ("own", "parquet")
    )
    assert one == other
    assert one.total() > 40


def test_questions_of_the_phantom_are_the_same_samples(tmp_path: Path, deid: Deidentifier) -> None:
    root = tmp_path / "vqa-rad"
    small = ["--patients", "6", "--size", "64", "--workers", "1"]
    cli.main(["phantom", "vqa-rad", "--out", str(root), *small])
    own = VQARAD(root=root).plan(deid)
    as_parquet(
        own,
        tmp_path / "hub",
        lambda each: [
            (question.split, {"question": question.question, "answer": question.answer})
            for question in questions_of(each)
        ],
    )
    plan = planned(tmp_path / "hub/*.parquet", deid, QUESTIONS)

    def asked(each: Plan) -> dict[bytes, Counter[tuple[str, ...]]]:
        return {
            encoded(record.sample.image): Counter(
                (question.split, question.question, question.answer)
                for question in questions_of(record.sample)
            )
            for record in each.records
            if record.sample.image is not None
        }

    assert asked(plan) == asked(own)
    assert len(plan.records) == len(own.records) > 4


READ = """
import sys
from pathlib import Path
from medvl.data import FileAccess
from medvl.data.corpora.parquet_files import ParquetColumns, ParquetFiles
from medvl.data.privacy import Deidentifier

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

columns = ParquetColumns(text_column=("caption",))
def plan(name):
    files = (str(Path(sys.argv[1]) / name),)
    corpus = ParquetFiles(files=files, columns=columns, rows_are_patients=True)
    return corpus.plan(Deidentifier(bytes(32)), FileAccess(copies=Path(sys.argv[1]) / name / "p" / "c"))

plan("small")
before = peak()
print(len(plan("large").records), peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the memory of a process on Linux"
)
def test_memory_is_that_of_a_group_of_rows(tmp_path: Path) -> None:
    """150 MB of images in groups of 5 MB."""
    noise = np.random.default_rng(0).integers(0, 256, (500, 1000), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noise).save(encoded, "PNG")
    for name, count in (("small", 10), ("large", 300)):
        images = [encoded.getvalue()] * count
        captions = ["Normal."] * count
        write(tmp_path / name / "train.parquet", images, BYTES, group=10, caption=captions)
    printed = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], check=True, capture_output=True, text=True
    )
    rows, kilobytes = map(int, printed.stdout.split())
    assert rows == 300
    assert kilobytes < 40 << 10
