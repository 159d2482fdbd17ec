"""Published lists of test images: converted alone, and left out of training."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora.common.published_lists import read_published_list
from medvl.data.corpora.labels.chexpert import CheXpert, image_name
from medvl.data.corpora.reports.chexpert_plus import CheXpertPlus
from medvl.data.corpora.reports.mimic_cxr import MimicCXR, image_name as dicom_id
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.verify import check_against
from medvl.errors import ConfigError, CorpusError, EvaluationError, SplitError
from medvl.eval.retrieval.candidate_lists import RetrievalList, read_published
from medvl.phantom import read_truth, write_chexpert, write_chexpert_plus, write_mimic_cxr_jpg

SIZE = {"patients": 6, "size": 32, "workers": 1}
CLASSES = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")


def write_list(path: Path, column: str, ids: Iterable[str]) -> Path:
    """Write a list in the layout of GLoRIA's chexpert_5x200.csv; each image has one class."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", column, "Sex", *CLASSES])
        for number, name in enumerate(ids):
            cells = [float(place == number % 5) for place in range(5)]
            writer.writerow([number, name, "Male", *cells])
    return path


@pytest.fixture(scope="module")
def chexpert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chexpert(tmp_path_factory.mktemp("chexpert"), **SIZE)


def frontal_of_training(root: Path) -> list[str]:
    rows = [row for row in read_truth(root) if row["split"] == "train"]
    return [row["path"] for row in rows if "view1_frontal" in row["path"]]


def test_a_list_is_converted_alone_with_its_labels(
    chexpert: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    names = frontal_of_training(chexpert)[:3]
    names.append("CheXpert-v1.0/train/patient09999/study1/view1_frontal.jpg")
    listed = write_list(tmp_path / "chexpert_5x200.csv", "Path", names)
    plan = CheXpert(root=chexpert, only=listed).plan(deid)
    samples = {sample.key: sample for sample in plan.iter_samples()}
    assert samples.keys() == {deid.image(image_name(name)) for name in names[:3]}
    for number, name in enumerate(names[:3]):
        sample = samples[deid.image(image_name(name))]
        assert sample.split == "test"
        assert sample.labels == {label: int(i == number) for i, label in enumerate(CLASSES)}
    assert plan.warnings == {"listed_without_row": 1}
    assert plan.excluded == {"not_listed": plan.rows.read - 3}
    candidates = read_published(listed, deid)
    assert candidates.keys >= samples.keys()
    assert candidates.candidates[1] == (deid.image(image_name(names[1])), ("Cardiomegaly",))


def test_evaluation_refuses_training_on_a_list_and_accepts_it_without(
    chexpert: Path, tmp_path: Path
) -> None:
    (name,) = frontal_of_training(chexpert)[:1]
    listed = write_list(tmp_path / "list.csv", "Path", [name])
    salt = tmp_path / "salt"
    salt.write_text("ab" * 32)

    def convert(out: str, *options: str) -> Path:
        command = ["shards", "chexpert", "--root", str(chexpert), "--out", str(tmp_path / out)]
        shared = ["--salt-file", str(salt), "--workers", "1", "--short-side", "32"]
        cli.main([*command, *shared, *options])
        return tmp_path / out

    test = Manifest.read(convert("list", "--only", str(listed)) / "test")
    with raises(SplitError, "leak"):
        check_against(Manifest.read(convert("all") / "train"), test)
    left = Manifest.read(convert("left", "--exclude", str(listed)) / "train")
    check_against(left, test)
    patient = name.split("/")[-3]
    images = [row["path"] for row in read_truth(chexpert) if patient in row["path"]]
    assert len(images) > 1
    assert left.excluded_from_corpus["listed_image"] == 1
    assert left.excluded_from_corpus["patient_of_listed_image"] == len(images) - 1


def test_lists_of_mimic_name_images_or_studies(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_mimic_cxr_jpg(tmp_path / "mimic", **SIZE)
    rows = list(read_truth(root))
    first, other = rows[0], next(row for row in rows if row["subject_id"] != rows[0]["subject_id"])
    by_path = write_list(tmp_path / "paths.csv", "path", [f"/data/{first['path']}"])
    (sample,) = MimicCXR(root=root, only=by_path).plan(deid).iter_samples()
    assert (sample.key, sample.split) == (deid.image(first["dicom_id"]), "test")
    assert sample.sections
    assert sample.labels["Atelectasis"] == 1
    by_study = write_list(tmp_path / "studies.csv", "study_id", [str(other["study_id"])])
    plan = MimicCXR(root=root, only=by_study).plan(deid)
    expected = {deid.image(row["dicom_id"]) for row in rows if row["study_id"] == other["study_id"]}
    assert {sample.key for sample in plan.iter_samples()} == expected
    left = MimicCXR(root=root, exclude=by_study).plan(deid)
    assert deid.patient(other["subject_id"]) not in {one.patient for one in left.iter_samples()}
    assert left.excluded["listed_image"] == len(expected)
    with raises(CorpusError, "malformed", "Path"):
        read_published(by_study, deid)


def test_lists_of_chexpert_plus_keep_reports(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_chexpert_plus(tmp_path / "plus", **SIZE)
    listed = tmp_path / "paths.txt"
    listed.write_text("\n".join(row["path"].replace(".png", ".jpg") for row in read_truth(root)))
    corpus = CheXpertPlus(root=root, only=listed)
    plan = corpus.plan(deid)
    whole = {one.key: one for one in CheXpertPlus(root=root).plan(deid).iter_samples()}
    assert len(plan.records) == len(whole)
    for sample in plan.iter_samples():
        other = whole[sample.key]
        assert (sample.split, sample.sections) == ("test", other.sections)
        assert sample.labels == other.labels, "the list has none"
    assert corpus.notes(plan) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Path,Edema\nimage7.jpg,1\n", ("malformed", "Path")),
        ("Path,Edema\ntrain/patient1/study1/view1_frontal.jpg,2\n", ("malformed", "Edema")),
        (
            "Path,Edema\ntrain/patient1/study1/view1_frontal.jpg,1\n"
            "x/train/patient1/study1/view1_frontal.jpg,0\n",
            ("malformed", "Path"),
        ),
        ("Path,Edema\n", ("empty",)),
    ],
)
def test_damaged_lists_raise(text: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(text)
    with raises(CorpusError, *expected, names="list.csv"):
        read_published_list(tmp_path / "list.csv", ANYWHERE, image_name)


def test_one_list_at_a_time(chexpert: Path, tmp_path: Path, deid: Deidentifier) -> None:
    listed = write_list(tmp_path / "list.csv", "Path", frontal_of_training(chexpert)[:1])
    with raises(ConfigError, "conflict", "only"):
        CheXpert(root=chexpert, only=listed, exclude=listed).plan(deid)
    with raises(CorpusError, "malformed", "dicom_id"):
        dicom_id("image.jpg")


def test_a_published_list_becomes_candidates_of_retrieval(
    chexpert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = frontal_of_training(chexpert)[:3]
    listed = write_list(tmp_path / "chexpert_5x200.csv", "Path", names)
    salt = tmp_path / "salt"
    salt.write_text("ab" * 32)
    command = ["eval", "make-retrieval-list", "--out", str(tmp_path / "list.json")]
    cli.main([*command, "--published", str(listed), "--salt-file", str(salt)])
    assert "chexpert_5x200, 3 candidates" in capsys.readouterr().out
    read = RetrievalList.read(tmp_path / "list.json")
    deid = Deidentifier.from_file(salt)
    assert [key for key, _ in read.candidates] == [deid.image(image_name(name)) for name in names]
    bare = tmp_path / "bare.txt"
    bare.write_text("\n".join(names))
    with raises(EvaluationError, "unknown_name"):
        read_published(bare, deid)
