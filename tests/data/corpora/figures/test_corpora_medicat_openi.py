"""MedICaT and Open-i converters on valid and invalid fixtures in the published layouts, and on
real data.
"""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.figure_files import SMALL, write_image, write_table, xml

from medvl.data import FileAccess
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.figures import medicat
from medvl.data.corpora.reports import openi
from medvl.data.corpora.reports.openi import iter_openi_reports
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.data.splits import check_disjoint
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import World, compose_report, write_openi as write_openi_phantom

# MedICaT

TABLE = "s2_full_figures_oa_nonroco_combined_medical_top4_public.jsonl"


def figure_row(paper: int, number: int, **fields: object) -> dict[str, object]:
    licence = {"is_oa": True, "oa_status": "gold", "journal_is_oa": True,
        "journal_is_in_doaj": True,
               "license": "cc-by-nc-nd", "provenance": "unpaywall"}  # fmt: skip
    row = {
        "pdf_hash": f"{paper:040x}",
        "fig_key": f"Figure{number}",
        "fig_uri": f"2-Figure{number}-1.png",
        "s2_caption": f"Figure {number}. Barium enema of the stricture.",
        "s2orc_caption": None,
        "s2orc_references": None,
        "radiology": True,
        "scope": False,
        "predicted_type": "Medical images",
        "oa_info": {"doi": "10.0/x", "doi_url": "https://example.invalid/10.0/x", "oa": licence},
    }
    return row | fields


def write_medicat(root: Path, rows: list[dict[str, object]]) -> Path:
    for number, row in enumerate(rows):
        write_image(root / "figures" / f"{row['pdf_hash']}_{row['fig_uri']}", number)
    (root / TABLE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_medicat_samples_match_table(tmp_path: Path, deid: Deidentifier) -> None:
    references = [
        "A barium enema revealed a stenosis (Figure 1 ).",
        "(Figure 1 )",
        "It was fibrotic ( Figure 1) .",
    ]
    write_medicat(
        tmp_path,
        [
            figure_row(1, 1, s2orc_references=references),
            figure_row(
                1, 2, radiology=False, scope=True, oa_info={"doi": None, "oa": {"license": None}}
            ),
            figure_row(2, 1, s2_caption="", s2orc_caption="A chest CT scan."),
            figure_row(3, 1, s2_caption=None, s2orc_references=[], oa_info=None),
        ],
    )
    annotated = [{"pdf_hash": f"{1:040x}", "fig_key": "Figure1", "answer": "accept", "spans": [],
        "tokens": []},
                 {"pdf_hash": f"{2:040x}", "fig_key": "Figure1", "answer": "reject", "spans": [],
                 "tokens": []}]  # fmt: skip
    (tmp_path / "subcaptions_public.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in annotated)
    )
    plan = medicat.MedICaT(root=tmp_path).plan(deid)
    first, second, third, fourth = (record.sample for record in plan.records)
    assert dict(first.sections) == {
        "caption": "Figure 1. Barium enema of the stricture.",
        "reference-1": "A barium enema revealed a stenosis (Figure 1 ).",
        "reference-2": "(Figure 1 )",
        "reference-3": "It was fibrotic ( Figure 1) .",
    }
    assert first.extra == {
        "radiology": True, "scope": False, "figure_type": "Medical images",
        "licence": "cc-by-nc-nd", "subfigures": True,
    }  # fmt: skip
    assert second.extra == {"radiology": False, "scope": True, "figure_type": "Medical images"}
    assert third.sections == {"caption": "A chest CT scan."}
    assert not fourth.sections
    assert first.patient == second.patient == deid.patient(f"{1:040x}") != third.patient
    assert first.split == second.split
    assert first.study != second.study
    assert plan.warnings == {"blank_caption": 1}
    for record in plan.records:
        assert record.sample.image is not None
        assert record.sample.image.is_file()
        stored = sample_to_json(record.sample).decode()
        assert "10.0/x" not in stored
        assert f"{1:040x}" not in stored


def test_medicat_radiology_only_and_duplicates_are_excluded(
    tmp_path: Path, deid: Deidentifier
) -> None:
    rows = [
        figure_row(1, 1),
        figure_row(1, 1),
        figure_row(2, 1, radiology=False),
        figure_row(2, 2, radiology=None),
    ]
    write_medicat(tmp_path, rows)
    plan = medicat.MedICaT(root=tmp_path, radiology_only=True).plan(deid)
    assert [record.sample.key for record in plan.records] == [
        deid.image(f"{1:040x}_2-Figure1-1.png")
    ]
    assert (plan.excluded, plan.warnings) == ({"not_radiology": 2, "duplicate_line": 1}, {})
    assert len(list(medicat.MedICaT(root=tmp_path).plan(deid).iter_samples())) == 3


def test_medicat_splits_are_disjoint_by_article(tmp_path: Path, deid: Deidentifier) -> None:
    rows = [figure_row(paper, number) for paper in range(60) for number in range(3)]
    (tmp_path / f"{TABLE}.gz").write_bytes(
        gzip.compress("\n".join(json.dumps(row) for row in rows).encode())
    )
    plan = medicat.MedICaT(
        root=tmp_path,
        splits=(
            "train=0.5",
            "valid=0.5",
        ),
    ).plan(deid)
    patients: dict[str, set[str]] = {}
    for record in plan.records:
        patients.setdefault(record.sample.split, set()).add(record.sample.patient)
    check_disjoint(patients, "medicat")
    assert sorted(patients) == ["train", "valid"]
    with raises(ConfigError, "out_of_range", "splits"):
        medicat.MedICaT(root=tmp_path, splits=("train=0.5",)).plan(deid)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (figure_row(1, 1, fig_uri="../../etc/passwd"), ("malformed", "fig_uri")),
        (figure_row(1, 1, pdf_hash="PMC1"), ("malformed", "fig_uri")),
        (figure_row(1, 1, s2orc_references="one text"), ("wrong_type", "s2orc_references")),
        ({"pdf_hash": "1"}, ("missing", "fig_uri")),
    ],
)
def test_medicat_invalid_row_raises(
    tmp_path: Path, deid: Deidentifier, row: dict, expected: tuple[str, ...]
) -> None:
    (tmp_path / TABLE).write_text(json.dumps(row) + "\n")
    with raises(CorpusError, *expected):
        medicat.MedICaT(root=tmp_path).plan(deid)
    (tmp_path / TABLE).write_text(json.dumps(figure_row(1, 1))[:-9])
    with raises(CorpusError, "malformed"):
        medicat.MedICaT(root=tmp_path).plan(deid)


# Open-i


def write_openi(root: Path, reports: int = 3) -> Path:
    (root / "ecgen-radiology").mkdir(parents=True)
    for number in range(1, reports + 1):
        (root / f"ecgen-radiology/{number}.xml").write_bytes(xml(number))
        for image in ("IM-0001-3001", "IM-0001-4001"):
            write_image(root / f"NLMCXR_png/CXR{number}_{image}.png", number)
    return root


def test_openi_samples_match_reports(tmp_path: Path, deid: Deidentifier) -> None:
    samples = list(openi.OpenI(root=write_openi(tmp_path)).plan(deid).iter_samples())
    assert len(samples) == 6
    first, second = samples[:2]
    assert first.patient == second.patient == deid.patient("CXR1") != samples[2].patient
    assert (first.study, first.split) == (second.study, second.split)
    assert first.key == deid.image("CXR1_IM-0001-3001")
    assert dict(first.sections) == {
        "comparison": "None.",
        "findings": "Heart < 1/2. XXXX effusion on the left.",
        "impression": "Effusion.",
    }
    assert first.extra == {
        "mesh_major": ["Pleural Effusion/left", "Opacity"],
        "mesh_automatic": ["effusion"],
    }
    assert {name for name, value in first.labels.items() if value} == {"Pleural Effusion"}
    assert set(first.labels) == set(openi.LABELS)
    assert first.view is None  # captions describe the study, not the image
    assert all(sample.image is not None and sample.image.is_file() for sample in samples)


def test_openi_kaggle_file_names_and_views_are_read(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_openi(tmp_path)
    for path in (root / "NLMCXR_png").iterdir():
        path.rename(path.with_name(path.name.removeprefix("CXR").replace(".png", ".dcm.png")))
    rows = [["1", "1_IM-0001-3001.dcm.png", "Frontal"], ["1", "1_IM-0001-4001.dcm.png", "Lateral"]]
    write_table(root / "indiana_projections.csv", ["uid", "filename", "projection"], rows)
    samples = list(openi.OpenI(root=root).plan(deid).iter_samples())
    assert [sample.view for sample in samples] == ["FRONTAL", "LATERAL", None, None, None, None]
    assert all(sample.image is not None and sample.image.is_file() for sample in samples)
    frontal = openi.OpenI(root=root, views=("FRONTAL",)).plan(deid)
    assert [sample.key for sample in frontal.iter_samples()] == [samples[0].key]
    assert frontal.excluded == {"view": 5}
    with raises(ConfigError, "unknown_name", "views"):
        openi.OpenI(root=root, views=("PA",)).plan(deid)
    write_table(
        root / "indiana_projections.csv",
        ["uid", "filename", "projection"],
        [[*rows[0][:2], "Oblique"]],
    )
    with raises(CorpusError, "malformed", "projection"):
        openi.OpenI(root=root).plan(deid)


def test_openi_reports_without_images_or_sections_are_counted(
    tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_openi(tmp_path)
    report = root / "ecgen-radiology/2.xml"
    text = report.read_text()
    report.write_text(text[: text.index("  <parentImage")] + "</eCitation>")
    report = root / "ecgen-radiology/3.xml"
    report.write_text(
        report.read_text().replace("FINDINGS", "TECHNIQUE").replace("IMPRESSION", "HISTORY")
    )
    plan = openi.OpenI(root=root).plan(deid)
    assert len(plan.records) == 4
    assert plan.warnings == {"report_without_image": 1, "no_findings_or_impression": 1}
    assert openi.OpenI(root=write_openi(tmp_path / "indexed")).plan(deid).warnings == {}
    report.write_text(
        report.read_text().replace("Pleural Effusion/left</major><major>Opacity", "No Indexing")
    )
    plan = openi.OpenI(root=root).plan(deid)
    assert plan.warnings["not_indexed"] == 1
    assert [len(sample.labels) for sample in plan.iter_samples()] == [15, 15, 0, 0]
    with raises(CorpusError, "not_found"):
        openi.OpenI(root=tmp_path / "NLMCXR_png").plan(deid)


@pytest.mark.parametrize(
    ("terms", "present"),
    [
        (("normal",), {"No Finding"}),
        (("Calcified Granuloma/lung/hilum/left", "Subcutaneous Emphysema/neck"), {"No Finding"}),
        (
            ("Pulmonary Atelectasis/base/left", "Thickening/pleura/apex"),
            {"Atelectasis", "Pleural Thickening"},
        ),
        (
            ("Thickening/lung/interstitial", "Cystic Fibrosis", "Pericardial Effusion"),
            {"No Finding"},
        ),
        (
            ("Hernia, Hiatal/large", "Emphysema", "Infiltrate/lung/base"),
            {"Hernia", "Emphysema", "Infiltration"},
        ),
        (("No Indexing",), set()),
        ((), set()),
    ],
)
def test_openi_labels_follow_the_mesh_terms(terms: tuple[str, ...], present: set[str]) -> None:
    assert {name for name, value in openi.mesh_labels(terms).items() if value} == present


def test_openi_phantom_round_trip(tmp_path: Path, deid: Deidentifier) -> None:
    """The phantom's labels, texts and views are those of the world, and its labels come from the
    terms alone.
    """
    write_openi_phantom(tmp_path, patients=24, seed=46, size=32, workers=1)
    studies = [patient.studies[0] for patient in World(46).patients(24)]
    plan = openi.OpenI(root=tmp_path, views=("FRONTAL",)).plan(deid)
    assert not plan.warnings.get("not_indexed")
    samples = {sample.patient: sample for sample in plan.iter_samples()}
    assert len(samples) == 24
    for number, study in enumerate(studies, start=1):
        sample, truth = samples[deid.patient(f"CXR{number}")], study.labels
        assert sample.image is not None
        assert sample.image.is_file()
        assert sample.view == "FRONTAL"
        assert sample.sections.get("findings", "") == compose_report(study).findings
        for label in (
            "Atelectasis",
            "Cardiomegaly",
            "Edema",
            "Pleural Effusion",
            "Pneumonia",
            "Pneumothorax",
        ):
            assert sample.labels[label] == truth[label]
        assert sample.labels["Nodule"] == truth["Lung Lesion"]
        assert sample.labels["Pleural Thickening"] == truth["Pleural Other"]


# Real data


@pytest.mark.real
def test_openi_full_collection_has_the_published_counts(
    real_data: Path, deid: Deidentifier
) -> None:
    """Reports of the full collection, without its images."""
    plan = openi.OpenI(root=real_data / "openi").plan(deid)
    assert (
        len(plan.records)
        == openi.OpenI.counts["images"]
        == len({record.sample.key for record in plan.records})
    )
    assert plan.warnings == {
        "report_without_image": 104,
        "no_findings_or_impression": 28,
        "not_indexed": 95,
    }
    assert len({record.sample.patient for record in plan.records}) == 3955 - 104


@pytest.mark.real
def test_openi_labels_agree_with_the_published_ones(real_data: Path) -> None:
    """3,080 reports with the labels that NegBio's authors made from the same MeSH terms; the
    data card lists them.
    """
    with (real_data / "openi_gold_labels" / "openi_gold.csv").open(encoding="utf-8") as file:
        published = {row.pop("filename"): row for row in csv.DictReader(file)}
    renamed = {"Effusion": "Pleural Effusion", "Pleural_Thickening": "Pleural Thickening"}
    more, fewer = Counter[str](), Counter[str]()
    for report in iter_openi_reports(real_data / "openi" / "NLMCXR_reports.tgz"):
        labels = openi.mesh_labels(report.mesh_major)
        for name, value in published.get(report.id, {}).items():
            if name != "normal":
                difference = labels.get(renamed.get(name, name), 0) - int(value)
                more[name] += difference == 1
                fewer[name] += difference == -1
    assert +more == {"Hernia": 41, "Emphysema": 3, "Pneumothorax": 3}
    assert +fewer == {"Effusion": 4, "Pleural_Thickening": 8}


@pytest.mark.real
def test_medicat_real_figures_convert(real_data: Path, tmp_path: Path, deid: Deidentifier) -> None:
    """Ten figures with their texts, written in the layout of the release."""
    folder = real_data / "medicat_sample"
    rows = []
    for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines():
        figure = json.loads(line)
        article, _, file = Path(figure["image"]).name.partition("_")
        texts = {
            "s2_caption": figure["caption"],
            "s2orc_caption": None,
            "s2orc_references": figure["inline_refs"],
        }
        classes = {name: figure[name] for name in ("radiology", "scope", "oa_info")}
        row = {
            "pdf_hash": article,
            "fig_key": file,
            "fig_uri": file,
            "predicted_type": figure["type"],
        }
        rows.append(row | texts | classes)
    (tmp_path / "sample.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "figures").symlink_to(folder / "images")
    plan = medicat.MedICaT(root=tmp_path).plan(deid, FileAccess(follow_links=True))
    manifests = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=0), SMALL
    )
    assert sum(manifest.samples for manifest in manifests.values()) == len(rows) == 10
    sources = [ShardSource(tmp_path / "out" / split) for split in manifests]
    samples = [source.sample(position) for source in sources for position in range(len(source))]
    assert all(sample.sections["caption"].startswith("Fig") for sample in samples)
    assert sum(len(sample.sections) - 1 for sample in samples) == sum(
        len(row["s2orc_references"] or ()) for row in rows
    )
    assert len({sample.patient for sample in samples}) == len({row["pdf_hash"] for row in rows})
