"""MIMIC-CXR, CheXpert and table converters on valid and invalid fixtures in the published
layouts.
"""

import csv
import dataclasses
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.errors import assert_skipped, raises
from helpers.mimic_files import IMAGES, LABELS, textured, write_csv_gz

from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora import table
from medvl.data.corpora.common.tables import Record, read_record
from medvl.data.corpora.labels import chexpert
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.corpora.table import TableColumns
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FINDINGS, Sample


def test_mimic_samples_match_tables_and_reports(mimic_root: Path, deid: Deidentifier) -> None:
    samples = {
        sample.key: sample
        for sample in mimic_cxr.MimicCXR(root=mimic_root).plan(deid).iter_samples()
    }
    assert len(samples) == len(IMAGES)
    for subject, study, dicom_id, view, split in IMAGES:
        sample = samples[deid.image(dicom_id)]
        assert (sample.corpus, sample.split, sample.view) == ("mimic-cxr", split, view or None)
        assert sample.patient == deid.patient(subject)
        assert sample.labels == {name: int(float(value)) for name, value in LABELS[study].items()}
        assert sample.image is not None
        assert sample.image.is_file()
        assert sample.sections
    effusion = samples[deid.image(IMAGES[0][2])]
    assert effusion.sections["findings"].startswith(
        "There is a small left pleural effusion. The heart is mildly enlarged."
    )
    assert effusion.sections["impression"] == "Small left pleural effusion."
    headerless = samples[deid.image(IMAGES[3][2])]
    assert "dense consolidation" in headerless.sections["last_paragraph"]


def test_mimic_samples_contain_no_raw_ids(mimic_root: Path, deid: Deidentifier) -> None:
    samples = list(mimic_cxr.MimicCXR(root=mimic_root).plan(deid).iter_samples())
    assert len(samples) == len(IMAGES)
    for sample in samples:
        stored = sample_to_json(sample).decode()
        for subject, study, dicom_id, _, _ in IMAGES:
            assert subject not in stored
            assert study not in stored
            assert dicom_id not in stored
            assert dicom_id[:8] not in stored


def test_mimic_studies_are_ordered_by_date_and_time_which_are_not_kept(
    mimic_root: Path, deid: Deidentifier
) -> None:
    times = {
        "50414267": ("21800506", "93012.5"),
        "53189527": ("21800506", "213014.531"),
        "57375967": ("", ""),
    }
    columns = ["dicom_id", "subject_id", "study_id", "ViewPosition", "StudyDate", "StudyTime"]
    rows = [
        [image, subject, study, view, *times.get(study, ("22001231", ""))]
        for subject, study, image, view, _ in IMAGES
    ]
    write_csv_gz(mimic_root / "mimic-cxr-2.0.0-metadata.csv.gz", columns, rows)
    samples = list(mimic_cxr.MimicCXR(root=mimic_root).plan(deid).iter_samples())
    assert [sample.order for sample in samples] == [0, 0, 1, None, 0]
    for sample in samples:
        assert not re.search("2180|2200|93012|213014", sample_to_json(sample).decode())


def test_mimic_views_and_split_select_and_count_images(
    mimic_root: Path, deid: Deidentifier
) -> None:
    frontal = mimic_cxr.MimicCXR(root=mimic_root, views=("PA", "AP")).plan(deid)
    assert len(frontal.records) == 3
    assert frontal.excluded == {"view": 2}
    assert len(mimic_cxr.MimicCXR(root=mimic_root, split="test").plan(deid).records) == 1
    with raises(ConfigError, "unknown_name", "split"):
        mimic_cxr.MimicCXR(root=mimic_root, split="dev").plan(deid)


def test_mimic_images_without_labels_are_counted(mimic_root: Path, deid: Deidentifier) -> None:
    assert not mimic_cxr.MimicCXR(root=mimic_root).plan(deid).warnings
    rows = [["1", "50000001.0", *["1"] * len(FINDINGS)]]
    write_csv_gz(
        mimic_root / "mimic-cxr-2.0.0-chexpert.csv.gz", ["subject_id", "study_id", *FINDINGS], rows
    )
    plan = mimic_cxr.MimicCXR(root=mimic_root).plan(deid)
    assert plan.warnings == {"no_labels": len(plan.records)}


def test_mimic_missing_table_or_column_raises(mimic_root: Path, deid: Deidentifier) -> None:
    write_csv_gz(
        mimic_root / "mimic-cxr-2.0.0-chexpert.csv.gz",
        ["subject_id", "study_id", *FINDINGS[:-1]],
        [],
    )
    with raises(CorpusError, "missing", "Support Devices", names="chexpert.csv.gz"):
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid)
    (mimic_root / "mimic-cxr-2.0.0-split.csv.gz").unlink()
    with raises(CorpusError, "not_found", names="mimic-cxr-2.0.0-split.csv.gz"):
        mimic_cxr.MimicCXR(root=mimic_root, labeler="negbio").plan(deid)
    with raises(CorpusError, "not_found", "reports"):
        mimic_cxr.MimicCXR(root=mimic_root / "files").plan(deid)


@pytest.mark.parametrize("column", ["dicom_id", "subject_id", "study_id"])
def test_mimic_id_with_a_path_raises(mimic_root: Path, deid: Deidentifier, column: str) -> None:
    names = ["dicom_id", "subject_id", "study_id", "ViewPosition"]
    row = {
        "dicom_id": IMAGES[0][2],
        "subject_id": "10000032",
        "study_id": "50414267",
        "ViewPosition": "PA",
    }
    row[column] = "../../../secret"
    write_csv_gz(mimic_root / "mimic-cxr-2.0.0-metadata.csv.gz", names, [list(row.values())])
    write_csv_gz(mimic_root / "mimic-cxr-2.0.0-split.csv.gz", ["dicom_id", "study_id", "subject_id",
        "split"],
                 [[row["dicom_id"], row["study_id"], row["subject_id"], "train"]])  # fmt: skip
    with raises(CorpusError, "malformed"):
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid)


def test_mimic_invalid_label_raises(mimic_root: Path, deid: Deidentifier) -> None:
    rows = [["10000032", "50414267", "yes", *[""] * 13]]
    write_csv_gz(
        mimic_root / "mimic-cxr-2.0.0-chexpert.csv.gz", ["subject_id", "study_id", *FINDINGS], rows
    )
    with raises(CorpusError, "malformed", "Atelectasis"):
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid)


@pytest.mark.parametrize("damage", [b"", b"not gzip", "truncated"])
def test_mimic_damaged_table_raises(
    mimic_root: Path, deid: Deidentifier, damage: bytes | str
) -> None:
    path = mimic_root / "mimic-cxr-2.0.0-metadata.csv.gz"
    path.write_bytes(path.read_bytes()[:40] if damage == "truncated" else damage)
    with raises(CorpusError, "malformed", names="metadata.csv.gz"):
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid)


CHEXPERT_COLUMNS = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding",
    "Enlarged Cardiomediastinum",
                    "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation",
                    "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other",
                    "Fracture", "Support Devices"]  # fmt: skip


@pytest.fixture
def chexpert_root(tmp_path: Path) -> Path:
    root = tmp_path / "CheXpert-v1.0-small"
    rows = {
        "train": [
            [
                "train/patient00001/study1/view1_frontal.jpg",
                "Female",
                "68",
                "Frontal",
                "AP",
                "1.0",
                *[""] * 13,
            ],
            [
                "train/patient00002/study2/view1_frontal.jpg",
                "Unknown",
                "0",
                "Frontal",
                "PA",
                "",
                *["-1.0"] * 2,
                *[""] * 11,
            ],
            [
                "train/patient00002/study2/view2_lateral.jpg",
                "Male",
                "90",
                "Lateral",
                "",
                "",
                *["0.0"] * 13,
            ],
        ],
        "valid": [
            [
                "valid/patient64541/study1/view1_frontal.jpg",
                "Male",
                "73",
                "Frontal",
                "AP",
                *["0.0"] * 13,
                "1.0",
            ]
        ],
    }
    for split, lines in rows.items():
        (root / split).mkdir(parents=True)
        with (root / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(CHEXPERT_COLUMNS)
            writer.writerows([[f"CheXpert-v1.0-small/{line[0]}", *line[1:]] for line in lines])
    with (root / "test.csv").open(
        "w", newline=""
    ) as file:  # the later release: path and findings only
        writer = csv.writer(file)
        writer.writerow(["Path", *FINDINGS])
        writer.writerow(["test/patient64741/study1/view1_frontal.jpg", *["1.0"] * 14])
    return root


def test_chexpert_samples_match_tables(chexpert_root: Path, deid: Deidentifier) -> None:
    samples = list(chexpert.CheXpert(root=chexpert_root).plan(deid).iter_samples())
    assert [sample.split for sample in samples] == ["train", "train", "train", "valid", "test"]
    assert [sample.view for sample in samples] == ["AP", "PA", "LATERAL", "AP", "FRONTAL"]
    assert [sample.sex for sample in samples] == ["F", None, "M", "M", None]
    assert [sample.age for sample in samples] == [68, None, 90, 73, None]
    assert samples[0].labels == {"No Finding": 1}
    assert samples[1].labels == {"Enlarged Cardiomediastinum": -1, "Cardiomegaly": -1}
    assert samples[3].labels["Support Devices"] == 1
    assert samples[4].labels == dict.fromkeys(FINDINGS, 1)
    assert samples[1].patient == samples[2].patient != samples[0].patient
    assert samples[0].image == chexpert_root / "train/patient00001/study1/view1_frontal.jpg"


def test_chexpert_excludes_laterals_and_raises_on_malformed_tables(
    chexpert_root: Path, deid: Deidentifier
) -> None:
    plan = chexpert.CheXpert(root=chexpert_root, frontal_only=True, split="train").plan(deid)
    assert len(plan.records) == 2
    assert plan.excluded == {"lateral": 1}
    with raises(CorpusError, "not_found"):
        chexpert.CheXpert(root=chexpert_root / "train").plan(deid)
    (chexpert_root / "valid.csv").write_text(",".join(CHEXPERT_COLUMNS[:-1]) + "\n")
    with raises(CorpusError, "missing", "Support Devices", names="valid.csv"):
        chexpert.CheXpert(root=chexpert_root).plan(deid)
    (chexpert_root / "valid.csv").write_text(
        ",".join(CHEXPERT_COLUMNS) + "\n" + "../../etc/passwd,," + "," * 16 + "\n"
    )
    with raises(CorpusError, "malformed", "Path"):
        chexpert.CheXpert(root=chexpert_root).plan(deid)


ROWS = [
    {
        "image": "a.png",
        "patient": "p1",
        "caption": "CT of the chest.",
        "plane": "Axial",
        "tags": ["mass"],
        "age": 40,
    },
    {
        "image": "b.png",
        "patient": "p2",
        "caption": "MR of the brain.",
        "plane": "Sagittal",
        "tags": [],
        "age": None,
    },
    {
        "image": "c.png",
        "patient": "p2",
        "caption": "",
        "plane": "",
        "tags": ["mass", "edema"],
        "age": 95,
    },
]
COLUMNS = TableColumns(
    image_column="image",
    patient_column="patient",
    text_column=("caption",),
    category_column=("plane",),
    tags_column=("tags",),
    age_column="age",
)


def write_rows(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind.startswith("csv"):
        with (gzip.open if kind.endswith("gz") else open)(
            path, "wt", newline="", encoding="utf-8"
        ) as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows({**row, "tags": "|".join(row["tags"])} for row in ROWS)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl", "parquet"])
def test_table_formats_give_equal_samples(tmp_path: Path, deid: Deidentifier, kind: str) -> None:
    plan = table.Table(table=write_rows(tmp_path, kind), columns=COLUMNS, name="lab").plan(deid)
    assert plan.label_names == ("plane=Axial", "plane=Sagittal", "edema", "mass")
    first, second, third = (record.sample for record in plan.records)
    assert first.labels == {"plane=Axial": 1, "plane=Sagittal": 0, "edema": 0, "mass": 1}
    assert third.labels == {"edema": 1, "mass": 1}
    assert (first.age, second.age, third.age) == (40, None, 90)
    assert first.sections == {"caption": "CT of the chest."}
    assert third.sections == {}
    assert second.patient == third.patient
    assert second.split == third.split
    assert first.image == (tmp_path / "a.png").resolve()


def test_table_where_split_column_and_parse_reports_are_applied(
    tmp_path: Path, deid: Deidentifier
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {
        "image": "a.png",
        "patient": "p",
        "part": "train",
        "report": "FINDINGS: Clear.\nIMPRESSION: Normal.",
        "source": "x",
    }
    path.write_text(
        "".join(
            json.dumps(row | {"image": f"{n}.png", "source": s}) + "\n" for n, s in enumerate("xyx")
        )
    )
    columns = TableColumns(
        image_column="image",
        patient_column="patient",
        text_column=("report",),
        split_column="part",
        extra_column=("source",),
    )
    plan = table.Table(table=path, columns=columns, where=("source=x",), parse_reports=True).plan(
        deid
    )
    assert [record.sample.extra for record in plan.records] == [{"source": "x"}] * 2
    assert plan.excluded == {"where": 1}
    assert plan.records[0].sample.sections == {"findings": "Clear.", "impression": "Normal."}
    assert plan.records[0].sample.split == "train"


HOSPITAL = """JANE DOE
MRN: 12345678
DOB: 1/2/1950
INDICATION: Evaluate for pneumonia.
FINDINGS: Old text.
FINDINGS: Clear.
Signed by: John Roe
ADDENDUM: Small nodule.
"""


def hospital_sample(
    tmp_path: Path, deid: Deidentifier, reports: dict[str, str]
) -> tuple[Sample, Counter[str]]:
    """The sample of a one-row table with texts to parse, and the warnings."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"image": "a.png", "patient": "p", **reports}) + "\n")
    columns = TableColumns(
        image_column="image", patient_column="patient", text_column=tuple(reports)
    )
    plan = table.Table(table=path, columns=columns, parse_reports=True).plan(deid)
    return plan.records[0].sample, plan.warnings


def test_sections_of_a_report_are_the_same_in_every_corpus(
    tmp_path: Path, deid: Deidentifier
) -> None:
    """No section that identifies a person is stored, and all that is left out is counted."""
    expected = {
        "indication": "Evaluate for pneumonia.",
        "findings": "Clear.",
        "addendum": "Small nodule.",
    }
    counts = {"sections_naming_a_person": 3, "text_before_first_header": 1, "repeated_sections": 1}
    sample, warnings = hospital_sample(tmp_path, deid, {"report": HOSPITAL})
    assert sample.sections == expected
    assert warnings == counts
    (tmp_path / "s1.txt").write_text(HOSPITAL)
    counted = Counter[str]()
    sample = read_record(
        Record(dataclasses.replace(sample, sections={}), tmp_path / "s1.txt"), counted, ANYWHERE
    )
    assert sample.sections == expected
    assert +counted == counts


def test_table_joins_text_columns_of_one_section(tmp_path: Path, deid: Deidentifier) -> None:
    reports = {
        "chest": "FINDINGS: Clear.",
        "copy": "FINDINGS: Clear.",
        "abdomen": "FINDINGS: Gas.",
        "note": "Free.",
    }
    sample, warnings = hospital_sample(tmp_path, deid, reports)
    assert sample.sections == {"findings": "Clear. Gas.", "note": "Free."}
    assert warnings == {}


def test_table_without_findings_has_the_last_paragraph(tmp_path: Path, deid: Deidentifier) -> None:
    sample, warnings = hospital_sample(
        tmp_path, deid, {"report": "MRN: 1\nEXAM: CHEST\n\nThe lungs are clear.\n"}
    )
    assert sample.sections == {
        "examination": "CHEST. The lungs are clear.",
        "last_paragraph": "The lungs are clear.",
    }
    assert warnings == {"sections_naming_a_person": 1, "no_findings_or_impression": 1}


def test_reports_without_description_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    (tmp_path / "s1.txt").write_text("INDICATION: Evaluate for pneumonia.\n")
    sample, _ = hospital_sample(tmp_path, deid, {"report": "FINDINGS: Clear."})
    warnings = Counter[str]()
    read_record(Record(sample), warnings, ANYWHERE)
    assert +warnings == {}
    read_record(Record(sample, tmp_path / "s1.txt"), warnings, ANYWHERE)
    assert +warnings == {"no_description": 1}


@pytest.mark.parametrize(
    ("wanted", "kept"), [("true", ["0.png"]), ("1", ["0.png"]), ("False", ["1.png"]), ("yes", [])]
)
def test_table_where_matches_booleans(
    tmp_path: Path, deid: Deidentifier, wanted: str, kept: list[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"image": f"{n}.png", "patient": "p", "text": "Clear.", "seen": seen}
        for n, seen in enumerate([True, False])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = TableColumns(image_column="image", patient_column="patient", text_column=("text",))
    plan = table.Table(table=path, columns=columns, where=(f"seen={wanted}",)).plan(deid)
    assert [record.sample.image.name for record in plan.records if record.sample.image] == kept


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"image": ""}, ("missing", "image")),
        ({"patient": None}, ("missing", "patient")),
        ({"image": "../outside.png"}, ("malformed", "image")),
        ({"image": "/etc/passwd"}, ("malformed", "image")),
        ({"part": "../x"}, ("malformed", "part")),
        ({"label": "maybe"}, ("malformed", "label")),
    ],
)
def test_table_invalid_row_is_skipped(
    tmp_path: Path, deid: Deidentifier, change: dict, expected: tuple[str, ...]
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"image": "a.png", "patient": "p", "part": "train", "label": 1} | change
    path.write_text(json.dumps(row) + "\n")
    columns = TableColumns(
        image_column="image", patient_column="patient", split_column="part", label_column=("label",)
    )
    code, column = expected
    assert_skipped(
        table.Table(table=path, columns=columns).plan(deid),
        f"cell_{code}",
        names=f"rows.jsonl, row 1: {column} ",
    )


def test_table_unreadable_file_raises(tmp_path: Path, deid: Deidentifier) -> None:
    path = write_rows(tmp_path, "csv")
    with raises(CorpusError, "missing", "report"):
        table.Table(
            table=path,
            columns=TableColumns(
                image_column="image", patient_column="patient", text_column=("report",)
            ),
        ).plan(deid)
    with raises(CorpusError, "not_found"):
        table.Table(table=tmp_path / "none.csv", columns=COLUMNS).plan(deid)
    with raises(CorpusError, "unsupported"):
        table.Table(table=tmp_path / "rows.xlsx", columns=COLUMNS).plan(deid)
    (tmp_path / "bad.jsonl").write_text('{"image": 1\n')
    plan = table.Table(table=tmp_path / "bad.jsonl", columns=COLUMNS).plan(deid)
    assert_skipped(plan, "row_malformed", names="row 1: cannot be read as JSON")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with raises(CorpusError, "malformed"):
        table.Table(table=tmp_path / "bad.parquet", columns=COLUMNS).plan(deid)
    (tmp_path / "latin.csv").write_bytes("image,patient\na.png,J\xf6rg\n".encode("latin-1"))
    with raises(CorpusError, "malformed"):
        table.Table(
            table=tmp_path / "latin.csv",
            columns=TableColumns(image_column="image", patient_column="patient"),
        ).plan(deid)
    with raises(ConfigError, "out_of_range", "splits"):
        table.Table(table=path, columns=COLUMNS, splits=("train=0.5",)).plan(deid)


@pytest.mark.parametrize("kind", ["alone", "among others", "shared by rows"])
def test_parquet_cells_are_refused_before_they_take_memory(
    kind: str, tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that fills its group of rows, or the limit of a group, or that all rows share (3 GB
    if each had its own).
    """
    limits = dataclasses.replace(table._PARQUET_LIMITS, group=3 << 20)
    monkeypatch.setattr(table, "_PARQUET_LIMITS", limits)
    texts = {
        "alone": ["a" * (1 << 20)],
        "among others": ["b"] * 90 + ["a" * (4 << 20)],
        "shared by rows": ["a" * (1 << 20)],
    }
    rows = 3000 if kind == "shared by rows" else len(texts[kind])
    column = pyarrow.DictionaryArray.from_arrays(
        [0] * rows if kind == "shared by rows" else range(rows), texts[kind]
    )
    cells = {"image": [f"{n}.png" for n in range(rows)], "patient": ["p"] * rows, "text": column}
    pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "rows.parquet").stat().st_size < 1 << 18
    columns = TableColumns(image_column="image", patient_column="patient", text_column=("text",))
    pool = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool)
    try:
        with raises(CorpusError, "too_large"):
            table.Table(table=tmp_path / "rows.parquet", columns=columns).plan(deid)
    finally:
        pyarrow.set_memory_pool(before)
    assert pool.max_memory() < 32 << 20


READ_PARQUET = """
import sys
from pathlib import Path
from medvl.data.corpora.table import _read_rows
from medvl.errors import CorpusError

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

before = peak()
try:
    print(len(list(_read_rows(Path(sys.argv[1]), ["text"]))), peak() - before)
except CorpusError as error:
    print(error.code, peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the memory limit works on Linux only"
)
def test_memory_for_a_huge_parquet_cell_is_bounded(tmp_path: Path) -> None:
    """In a process that has freed no memory: 128 MB of text among empty cells, which three
    copies would take.
    """
    cells = ["a" * (128 << 20), *[""] * 4000]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": cells}), tmp_path / "huge.parquet", compression="zstd"
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a" * 1000] * 4000}), tmp_path / "small.parquet"
    )
    code, kilobytes = run_python(READ_PARQUET, tmp_path / "huge.parquet")
    assert code == "too_large"
    assert int(kilobytes) < 300 << 10
    rows, _ = run_python(READ_PARQUET, tmp_path / "small.parquet")
    assert int(rows) == 4000


def run_python(code: str, *arguments: Path) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    ).stdout.split()


def test_fixture_images_differ() -> None:
    """Equal fixture images would hide a mix-up of images."""
    first, second = (cv2.imencode(".png", textured(seed, 90, 120))[1] for seed in range(2))
    assert not np.array_equal(first, second)
