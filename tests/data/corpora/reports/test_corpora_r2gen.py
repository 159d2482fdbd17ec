"""R2Gen's annotation files: two views of a study for IU X-ray, one image an entry for MIMIC-CXR."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.corpora.reports import r2gen_annotation
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.errors import CorpusError

REPORT = "Nodule of 3.2 cm in the left lung.\nNo effusion."


@pytest.fixture
def deid(tmp_path: Path) -> Deidentifier:
    return Deidentifier.from_file(tmp_path / "salt", create=True)


def iu(number: int, split: str, images: int = 2, **fields: Any) -> dict[str, Any]:
    name = f"CXR{number}_IM-{number:04d}"
    paths = [f"{name}/{index}.png" for index in range(images)]
    return {"id": name, "report": REPORT, "image_path": paths, "split": split, **fields}


def mimic(dicom: str, subject: int, study: int) -> dict[str, Any]:
    path = f"p10/p{subject}/s{study}/{dicom}.jpg"
    return {
        "id": dicom,
        "study_id": study,
        "subject_id": subject,
        "report": REPORT,
        "image_path": [path],
        "split": "train",
    }


def write(root: Path, **splits: list[Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "annotation.json").write_text(json.dumps(splits))
    for entries in splits.values():
        for entry in entries:
            for path in entry.get("image_path", []):
                (root / "images" / path).parent.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng(len(path)).integers(0, 256, (40, 40), np.uint8)
                cv2.imwrite(str(root / "images" / path), pixels)
    return root


def test_iu_xray_has_two_images_of_each_study(tmp_path: Path, deid: Deidentifier) -> None:
    root = write(
        tmp_path / "iu",
        train=[iu(1, "train"), iu(2, "train", images=1)],
        val=[iu(3, "val")],
        test=[iu(4, "test")],
    )
    samples = list(r2gen_annotation.R2GenAnnotation(root=root).plan(deid).iter_samples())
    assert len(samples) == 7
    first, second, single = samples[:3]
    assert first.study == second.study
    assert (first.extra, second.extra, single.extra) == (
        {"image_number": 0},
        {"image_number": 1},
        {},
    )
    assert first.key != second.key
    assert [sample.split for sample in samples] == ["train"] * 3 + ["validate"] * 2 + ["test"] * 2
    assert first.sections == {"findings": "Nodule of 3.2 cm in the left lung. No effusion."}
    assert first.patient == deid.patient("CXR1"), "the patient of the Open-i shards"
    assert all(sample.image is not None and sample.image.is_file() for sample in samples)


def test_mimic_cxr_ids_are_those_of_its_own_shards(tmp_path: Path, deid: Deidentifier) -> None:
    entries = [
        mimic("02aa804e-bde0afdd", 10000032, 50414267),
        mimic("174413ec-4ec4c1f7", 10000032, 50414267),
    ]
    samples = list(
        r2gen_annotation.R2GenAnnotation(root=write(tmp_path / "mimic", train=entries))
        .plan(deid)
        .iter_samples()
    )
    assert [sample.key for sample in samples] == [deid.image(entry["id"]) for entry in entries]
    assert {sample.patient for sample in samples} == {deid.patient("10000032")}
    assert {sample.study for sample in samples} == {deid.study("10000032", "50414267")}


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "CXR1_IM-0001", "image_path": ["a.png"]},
        iu(1, "train", image_path=[]),
        iu(1, "train", image_path=["../../etc/passwd"]),
        {**iu(1, "train"), "id": "unknown"},
        {**mimic("x", 1, 2), "subject_id": "p/../1"},
        "text",
    ],
)
def test_malformed_entries_are_refused(entry: Any, tmp_path: Path, deid: Deidentifier) -> None:
    (tmp_path / "annotation.json").write_text(json.dumps({"train": [entry]}))
    with raises(CorpusError, "malformed"):
        r2gen_annotation.R2GenAnnotation(root=tmp_path).plan(deid)


def test_other_files_are_refused(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found"):
        r2gen_annotation.R2GenAnnotation(root=tmp_path).plan(deid)
    for content in ("{", "[]", '{"train": 3}', '{"development": []}'):
        (tmp_path / "annotation.json").write_text(content)
        with raises(CorpusError, "malformed"):
            r2gen_annotation.R2GenAnnotation(root=tmp_path).plan(deid)


def test_the_command_writes_shards_by_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "iu", train=[iu(1, "train"), iu(2, "train")], val=[iu(3, "val")])
    arguments = ["--root", str(root), "--out", str(tmp_path / "shards"), "--workers", "1"]
    cli.main(["shards", "r2gen-annotation", *arguments])
    assert "train: 4 samples of 2 patients" in capsys.readouterr().out
    source = ShardSource(tmp_path / "shards" / "train")
    assert sorted(source.sample(position).extra["image_number"] for position in range(4)) == [
        0,
        0,
        1,
        1,
    ]


@pytest.mark.real
def test_published_references_are_the_findings_of_openi(real_data: Path) -> None:
    """The 590 test references that a system on R2Gen's split has published."""
    import csv
    import re

    from medvl.data.corpora.reports.openi import iter_openi_reports

    findings = {report.id: report.sections.get("findings", "") for report in
                iter_openi_reports(real_data / "openi" / "NLMCXR_reports.tgz")}  # fmt: skip
    with (real_data / "generated_reports_iu" / "moerad" / "gts.csv").open(
        newline="", encoding="utf-8"
    ) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 590

    def words(text: str) -> list[str]:
        return re.findall(r"[a-z0-9]+", text.lower())

    assert all(
        words(row["report"]) == words(findings[row["study_id"].split("_")[0]]) for row in rows
    )
