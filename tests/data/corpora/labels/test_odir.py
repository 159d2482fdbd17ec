"""ODIR-5K: keywords and labels of each eye, and what is left out."""

import csv

import pytest
from helpers.errors import raises

from medvl.data.corpora.labels.odir import ODIR
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

COLUMNS = (
    *("ID", "Patient Age", "Patient Sex", "Left-Diagnostic Keywords", "Right-Diagnostic Keywords"),
    *("N", "D", "labels", "filename"),
)


def write(root, *rows, folder="preprocessed_images"):
    (root / folder).mkdir(parents=True)
    with (root / "full_df.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return root


def row(left="normal fundus", right="normal fundus", name="7_left.jpg", patient="7"):
    return (patient, "96", "Female", left, right, "0", "1", "['D']", name)


def plan(root, **options):
    return ODIR(root=root, **options).plan(Deidentifier(b"0" * 32))


def positives(sample):
    return {name for name, value in sample.labels.items() if value == 1}


def test_each_eye_has_its_own_keywords_and_the_columns_of_the_patient_are_not_read(tmp_path):
    left = "Moderate non proliferative retinopathy，hypertensive  retinopathy"
    eyes = (row(left), row(left, name="7_right.jpg"))
    records = list(plan(write(tmp_path, *eyes)).records)
    first, second = (record.sample for record in records)
    assert first.sections == {
        "impression": "moderate non proliferative retinopathy, hypertensive retinopathy"
    }
    assert positives(first) == {"Diabetic Retinopathy", "Hypertensive Retinopathy"}
    assert positives(second) == {"Normal"}
    assert first.patient == second.patient
    assert first.key != second.key
    assert first.split == second.split
    assert (first.sex, first.age, first.extra) == ("F", 90, {"eye": "left"})


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ("mild nonproliferative retinopathy", {"Diabetic Retinopathy": 1}),
        ("severe proliferative diabetic retinopathy", {"Diabetic Retinopathy": 1}),
        ("suspected glaucoma", {"Glaucoma": -1}),
        ("suspected glaucoma，glaucoma", {"Glaucoma": 1}),
        ("wet age-related macular degeneration", {"AMD": 1}),
        ("myopic maculopathy", {"Pathological Myopia": 1}),
        ("drusen", {}),
        ("lens dust，normal fundus", {"Normal": 1}),
    ],
)
def test_labels_follow_the_keywords(tmp_path, keywords, expected):
    (record,) = plan(write(tmp_path, row(keywords))).records
    labels = record.sample.labels
    assert {name: value for name, value in labels.items() if value} == expected
    assert set(labels) == set(ODIR.labels)


def test_images_without_a_fundus_or_keywords_are_counted(tmp_path):
    rows = (
        row("anterior segment image"),
        row("no fundus image", name="8_left.jpg", patient="8"),
        row(" ， ", name="9_left.jpg", patient="9"),
        row("suspected glaucoma", name="10_left.jpg", patient="10"),
    )
    found = plan(write(tmp_path, *rows))
    assert found.rows.read == 4
    assert found.rows.kept == len(list(found.records)) == 1
    assert found.rows.excluded == {"no_fundus": 2, "no_keywords": 1}
    assert found.warnings == {"doubtful_keywords": 1}


def test_a_name_of_another_patient_is_refused(tmp_path):
    with raises(CorpusError, "malformed", "filename", names="8_left.jpg"):
        plan(write(tmp_path, row(name="8_left.jpg")))


def test_the_folder_of_images_is_found_or_named(tmp_path):
    other = write(tmp_path / "a", row(), folder="ODIR-5K/ODIR-5K/Training Images")
    (record,) = plan(other).records
    assert record.sample.image == other / "ODIR-5K/ODIR-5K/Training Images/7_left.jpg"
    bare = write(tmp_path / "b", row(), folder="elsewhere")
    with raises(CorpusError, "not_found", "images", names="--images"):
        plan(bare)
    (record,) = plan(bare, images=bare / "elsewhere").records
    assert record.sample.image == bare / "elsewhere/7_left.jpg"
