"""MedViLL's JSON lines and M3AE's Arrow files, which users have from these projects' own
preparation.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data import FileAccess
from medvl.data.corpora.figures import m3ae_arrow
from medvl.data.corpora.reports import medvill_jsonl
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.storage.tars import read_part
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FilePart

TEXT = "Moderate cardiomegaly.\nNo effusion."


@pytest.fixture
def deid(tmp_path: Path) -> Deidentifier:
    return Deidentifier.from_file(tmp_path / "salt", create=True)


def png(seed: int = 0) -> bytes:
    return cv2.imencode(".png", np.random.default_rng(seed).integers(0, 256, (40, 40), np.uint8))[
        1
    ].tobytes()


def line(name: str, **fields: Any) -> dict[str, Any]:
    labels = "'Cardiomegaly', 'Support Devices'"
    return {"id": name, "label": labels, "text": TEXT, "img": f"preprocessed/{name}.jpg", **fields}


def write_lines(root: Path, **files: list[Any]) -> Path:
    root.mkdir(exist_ok=True)
    for name, rows in files.items():
        (root / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for row in rows:
            (root / "preprocessed").mkdir(exist_ok=True)
            (root / "preprocessed" / f"{row['id']}.jpg").write_bytes(png(len(row["id"])))
    return root


def test_medvill_openi(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_lines(
        tmp_path / "openi",
        Train=[line("2548"), line("60", label="''")],
        Test=[line("1000", text=" ")],
    )
    plan = medvill_jsonl.MedViLLJsonl(root=root).plan(deid)
    first, second, test = plan.iter_samples()
    assert first.patient == deid.patient("CXR2548"), "the patient of the Open-i shards"
    assert first.sections == {"findings": "Moderate cardiomegaly. No effusion."}
    assert first.extra == {"medvill_labels": ["Cardiomegaly", "Support Devices"]}
    assert second.extra == {"medvill_labels": []}
    assert not first.labels
    assert (test.split, test.sections) == ("test", {})
    assert plan.warnings == {"empty_report": 1}


def test_medvill_labels_in_another_form_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_lines(
        tmp_path / "openi",
        Train=[line("1", label="Edema, Pneumonia"), line("2"), line("3", label="")],
    )
    plan = medvill_jsonl.MedViLLJsonl(root=root).plan(deid)
    assert plan.warnings == {"label_unreadable": 1}


def test_medvill_mimic_with_and_without_the_table_of_patients(
    tmp_path: Path, deid: Deidentifier
) -> None:
    rows = [line(name, split="valid") for name in ("s50414267", "02aa804e-bde0", "s59999999")]
    root = write_lines(tmp_path / "mimic", Valid=rows)
    (tmp_path / "split.csv").write_text(
        "dicom_id,study_id,subject_id,split\n02aa804e-bde0,50414267,10000032,train\nx,5,6,test\n"
    )
    plan = medvill_jsonl.MedViLLJsonl(
        root=root, source="mimic", patients=tmp_path / "split.csv"
    ).plan(deid)
    study, image, unknown = plan.iter_samples()
    assert study.patient == image.patient == deid.patient("10000032")
    assert study.study == image.study == deid.study("10000032", "50414267")
    assert unknown.patient == deid.patient("s59999999")
    assert plan.warnings == {"patient_unknown": 1}
    assert medvill_jsonl.MedViLLJsonl(root=root, source="mimic").plan(deid).warnings == {
        "patient_unknown": 3
    }
    with raises(ConfigError, "conflict", "patients"):
        medvill_jsonl.MedViLLJsonl(root=root, patients=tmp_path / "split.csv").plan(deid)


@pytest.mark.parametrize("change", [{"img": "../../etc/passwd"}, {"text": None}, {"id": "a/b"}])
def test_medvill_refuses_malformed_lines(
    change: dict[str, Any], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, "not_found"):
        medvill_jsonl.MedViLLJsonl(root=tmp_path).plan(deid)
    (tmp_path / "Train.jsonl").write_text(json.dumps({**line("1"), **change}))
    with raises(CorpusError, "malformed"):
        medvill_jsonl.MedViLLJsonl(root=tmp_path).plan(deid)


def arrow(path: Path, rows: list[tuple[Any, list[str], str]], **columns: Any) -> None:
    images, captions, names = zip(*rows, strict=True)
    table = pyarrow.table({"image": images, "caption": captions, "image_id": names, **columns})
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


CAPTION, REFERENCE = "Chest radiograph with an effusion.", "The effusion was drained on day two."


def test_m3ae_figures_and_reports(tmp_path: Path, deid: Deidentifier) -> None:
    pdf = "0a1b2c3d4e" * 4
    names = (
        f"data/release/figures/{pdf}_3-Figure1-1.png",
        "roco/val/PMC4083729_AMHSR-4-14-g002.jpg",
        "other/1.png",
    )
    arrow(tmp_path / "medicat_train.arrow", [(png(), [CAPTION, REFERENCE, REFERENCE], names[0])])
    arrow(tmp_path / "roco_val.arrow", [(png(1), [CAPTION], name) for name in names[1:]])
    study = "files/p10/p10000032/s50414267/02aa.jpg"
    labels = {"chexpert": [[0, 1]], "split": ["test"]}
    arrow(
        tmp_path / "mimic_cxr_test.arrow",
        [(png(2), ["No effusion.", "Normal heart."], study)],
        **labels,
    )
    plan = m3ae_arrow.M3AEArrow(root=tmp_path).plan(deid, FileAccess(copies=tmp_path / "copies"))
    samples = {sample.key: sample for sample in plan.iter_samples()}
    figure, roco, other, report = (samples[deid.image(name)] for name in (*names, study))
    assert figure.sections == {"caption": CAPTION, "reference-1": REFERENCE}
    assert (figure.patient, figure.split) == (deid.patient(pdf), "train")
    assert (roco.patient, roco.split) == (deid.patient("PMC4083729"), "validate")
    assert other.patient == deid.patient("other/1.png")
    assert report.sections == {"impression": "No effusion.", "findings": "Normal heart."}
    assert report.study == deid.study("10000032", "50414267")
    assert isinstance(report.image, FilePart)
    assert read_part(report.image) == png(2)
    assert plan.warnings == {"repeated_reference": 1, "no_article": 1}


def test_the_caption_of_a_figure_of_roco_follows_its_references(
    tmp_path: Path, deid: Deidentifier
) -> None:
    """M3AE's preparation appends the captions of ROCO after the references of MedICaT."""
    names = [f"data/roco/train/radiology/images/ROCO_0000{number}.jpg" for number in (2, 3)]
    texts = ([REFERENCE, CAPTION], [CAPTION])
    arrow(
        tmp_path / "roco_train.arrow",
        [(png(), text, name) for text, name in zip(texts, names, strict=True)],
    )
    first, second = (
        m3ae_arrow.M3AEArrow(root=tmp_path)
        .plan(deid, FileAccess(copies=tmp_path / "copies"))
        .iter_samples()
    )
    assert first.sections == {"caption": CAPTION, "reference-1": REFERENCE}
    assert second.sections == {"caption": CAPTION}


def test_m3ae_refuses_other_files(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found"):
        m3ae_arrow.M3AEArrow(root=tmp_path).plan(deid, FileAccess(copies=tmp_path / "copies"))
    path = tmp_path / "vqa_rad_train.arrow"
    arrow(path, [(png(), ["a"], "x")], questions=[["Is it?"]])
    with raises(CorpusError, "unsupported"):
        m3ae_arrow.M3AEArrow(root=tmp_path).plan(deid, FileAccess(copies=tmp_path / "copies"))
    for content in (b"", b"ARROW1\0\0", path.read_bytes()[:-40]):
        path.write_bytes(content)
        with raises(CorpusError, "malformed"):
            m3ae_arrow.M3AEArrow(root=tmp_path).plan(deid, FileAccess(copies=tmp_path / "copies"))
    arrow(path, [("text", ["a"], "x")])
    with raises(CorpusError, "malformed"):
        m3ae_arrow.M3AEArrow(root=tmp_path).plan(deid, FileAccess(copies=tmp_path / "copies"))


READ_ARROW = """
import sys
from pathlib import Path
from medvl.data import FileAccess
from medvl.data.corpora.figures import m3ae_arrow
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

root = Path(sys.argv[1])
m3ae_arrow._BATCH_MEMORY = 1 << 26
try:
    corpus = m3ae_arrow.M3AEArrow(root=root)
    deid = Deidentifier.from_file(root / "salt", create=True)
    plan = corpus.plan(deid, FileAccess(copies=root / "copies"))
    print(len(list(plan.iter_samples())))
except CorpusError as error:
    print(error.code)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the memory limit works on Linux only"
)
@pytest.mark.parametrize(("compression", "printed"), [("zstd", "too_large"), (None, "1")])
def test_a_compressed_batch_cannot_fill_the_memory(
    tmp_path: Path, compression: str | None, printed: str
) -> None:
    """In a process that has freed no memory: a batch of 150 MB, which is mapped where it is not
    compressed.
    """
    table = pyarrow.table({"image": [bytes(150 << 20)], "caption": [["a"]], "image_id": ["x"]})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_file(tmp_path / "roco_train.arrow", table.schema, options=options) as file:
        file.write_table(table)
    read = subprocess.run(
        [sys.executable, "-c", READ_ARROW, tmp_path], check=True, capture_output=True, text=True
    ).stdout
    assert read.split() == [printed]


def test_the_commands_write_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_lines(tmp_path / "openi", Train=[line("2548"), line("60")], Valid=[line("100")])
    cli.main(
        [
            "shards",
            "medvill-jsonl",
            "--root",
            str(root),
            "--out",
            str(tmp_path / "jsonl"),
            "--workers",
            "1",
        ]
    )
    assert "train: 2 samples of 2 patients" in capsys.readouterr().out
    (tmp_path / "arrow").mkdir()
    arrow(
        tmp_path / "arrow" / "roco_train.arrow",
        [(png(), [CAPTION], "PMC1_a.jpg"), (png(1), [CAPTION], "PMC2_b.jpg")],
    )
    cli.main(
        [
            "shards",
            "m3ae-arrow",
            "--root",
            str(tmp_path / "arrow"),
            "--out",
            str(tmp_path / "out"),
            "--workers",
            "1",
        ]
    )
    assert "train: 2 samples of 2 patients" in capsys.readouterr().out
    source = ShardSource(tmp_path / "out" / "train")
    assert source.pixels(0).shape == (40, 40)
    assert not list((tmp_path / "out-private").glob("copies"))
