"""BRAX: the converter on fixtures in the published layout."""

from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.corpora.labels.brax import BRAX
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FINDINGS, Sample

COLUMNS = ["DicomPath", "PngPath", "PatientID", "PatientSex", "PatientAge", "AccessionNumber",
           "StudyDate", *FINDINGS, "ViewPosition", "Manufacturer"]  # fmt: skip


def row(
    name: str, patient: str, study: str, date: str, view: str, age: str = "30-34", **labels: str
) -> str:
    cells = [labels.get(label.replace(" ", "_"), "") for label in FINDINGS]
    paths = [f"Anonymized_DICOMs/{name}.dcm", f"images/{name}.png"]
    return ",".join([*paths, patient, "F", age, study, date, *cells, view, "X"])


ROWS = [
    row("p1/s2/1", "p1", "7", "20110101", "PA", Edema="1.0", Pneumonia="-1"),
    row("p1/s2/2", "p1", "7", "20110101", "L", Edema="1.0"),
    row("p1/s1/1", "p1", "3", "2010-05-01", "LT-DECUB", Edema="0"),
    row("p2/s1/1", "p2", "7", "20120101", "", age="85 or more"),
    row("p3/s1/1", "p3", "1", "", "CUBE", age="1|2"),
]


def write(root: Path, rows: list[str] = ROWS, name: str = "master_spreadsheet_update.csv") -> Path:
    (root / name).write_text("\n".join([",".join(COLUMNS), *rows]))
    return root


def samples_of(corpus: BRAX, deid: Deidentifier) -> dict[str, Sample]:
    plan = corpus.plan(deid)
    keys = {deid.image(f"images/{text.split(',')[1][7:]}"): text.split(",")[1] for text in ROWS}
    return {keys[sample.key]: sample for sample in plan.iter_samples()}


def test_views_bins_of_ages_and_studies(tmp_path: Path, deid: Deidentifier) -> None:
    samples = samples_of(BRAX(root=write(tmp_path)), deid)
    first, lateral, earlier, old, other = (samples[text.split(",")[1]] for text in ROWS)
    assert [each.view for each in samples.values()] == ["PA", "LATERAL", "LLD", None, None]
    assert (first.labels, old.labels) == ({"Edema": 1, "Pneumonia": -1}, {})
    assert (first.age, first.extra, old.extra) == (
        None, {"age_bin": "30-34"}, {"age_bin": "85 or more"}
    )  # fmt: skip
    assert other.extra == {}
    assert first.study == lateral.study != old.study, "the same number, another patient"
    assert (earlier.order, first.order, other.order) == (0, 1, None)
    assert first.patient == earlier.patient == deid.patient("p1")
    assert first.image == tmp_path / "images/p1/s2/1.png"
    plan = BRAX(root=tmp_path).plan(deid)
    assert plan.warnings == {"unknown_view": 1, "age_malformed": 1}


def test_dicom_files_have_the_keys_of_png_files(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path, name="master_spreadsheet.csv")
    of_png = samples_of(BRAX(root=tmp_path), deid)
    of_dicom = samples_of(BRAX(root=tmp_path, files="dicom"), deid)
    assert of_png.keys() == of_dicom.keys()
    assert of_dicom["images/p1/s2/1.png"].image == tmp_path / "Anonymized_DICOMs/p1/s2/1.dcm"


def test_views_select_and_options_are_checked(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    assert BRAX(root=tmp_path, views=("PA", "LLD")).plan(deid).excluded == {"view": 3}
    with raises(ConfigError, "unknown_name", "views"):
        BRAX(root=tmp_path, views=("L",)).plan(deid)
    with raises(ConfigError, "unknown_name", "files"):
        BRAX(root=tmp_path, files="jpg").plan(deid)


@pytest.mark.parametrize("path", ["../images/1.png", "images/../1.png", "/images/1.png", "1.png"])
def test_paths_outside_of_the_release_raise(path: str, tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path, [ROWS[0].replace("images/p1/s2/1.png", path)])
    with raises(CorpusError, "malformed", "PngPath", names="master_spreadsheet"):
        BRAX(root=tmp_path).plan(deid)
