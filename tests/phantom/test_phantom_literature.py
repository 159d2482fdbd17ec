"""Case reports of the phantom: captions agree with the ground truth, and converters read the
layouts.
"""

import json
import re
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.figures import medicat, roco
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import World, split_of, write_medicat, write_roco
from medvl.phantom.language.captions import (
    NOUN_PHRASES,
    Figure,
    article_figures,
    article_id,
    compose_caption,
    compose_references,
)
from medvl.phantom.language.lexicon import PRESENT
from medvl.phantom.layouts.figures import figure_bytes
from medvl.phantom.population.world import generator

PATIENTS, SEED, SIZE = 20, 4, 48
SPLIT = (0.6, 0.2, 0.2)


@pytest.fixture(scope="module")
def roco_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("roco")
    return write_roco(out, patients=PATIENTS, seed=SEED, size=SIZE, split=SPLIT, workers=1)


@pytest.fixture(scope="module")
def medicat_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_medicat(
        tmp_path_factory.mktemp("medicat"), patients=PATIENTS, seed=SEED, size=SIZE, workers=1
    )


@pytest.fixture(scope="module")
def articles() -> list[list[Figure]]:
    return [article_figures(patient) for patient in World(0).patients(300)]


def content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


# Captions

WORDS = {
    "atelectasis": "Atelectasis",
    "cardiomegaly": "Cardiomegaly",
    "enlarged heart": "Cardiomegaly",
    "enlarged cardiac silhouette": "Cardiomegaly",
    "consolidation": "Consolidation",
    "pulmonary edema": "Edema",
    "mediastinum": "Enlarged Cardiomediastinum",
    "rib fractures": "Fracture",
    "nodule": "Lung Lesion",
    "pleural effusion": "Pleural Effusion",
    "pleural thickening": "Pleural Other",
    "pneumonia": "Pneumonia",
    "pneumothorax": "Pneumothorax",
    "carina": "Support Devices",
}
DENIAL = re.compile(r"\b(no|not|without|normal|intact|clear|unremarkable)\b", re.IGNORECASE)


def test_every_form_of_a_finding_has_noun_phrases() -> None:
    assert {label: set(forms) for label, forms in NOUN_PHRASES.items()} == {
        label: set(forms) for label, forms in PRESENT.items()
    }


def test_captions_and_references_agree_with_the_ground_truth() -> None:
    counts: Counter[str] = Counter()
    for patient in World(1).patients(250):
        for study in patient.studies:
            for view in study.views:
                rng = generator(*view.key, 1)
                texts = [compose_caption(rng, study, view), *compose_references(rng, view, 1)]
                for sentence in (part for text in texts for part in text.split(". ")):
                    assert "{" not in sentence
                    assert "[" not in sentence
                    if DENIAL.search(sentence):
                        continue
                    for word, label in WORDS.items():
                        if word in sentence:
                            counts[word] += 1
                            assert study.labels[label] == 1, (word, sentence)
                    side = re.search(r"(right|left)(?:-sided)? pleural effusion", sentence)
                    if side:
                        (effusion,) = (
                            finding
                            for finding in view.findings
                            if finding.label == "Pleural Effusion"
                        )
                        assert effusion.side == side[1]
    assert min(counts[word] for word in WORDS) >= 5


def test_captions_name_the_view_and_are_varied() -> None:
    captions = {}
    for patient in World(2).patients(120):
        for study in patient.studies:
            for view in study.views:
                caption = compose_caption(generator(*view.key, 1), study, view)
                captions[caption] = view
                assert (
                    "lateral" in caption.lower()
                ) == view.lateral or "bilateral" in caption.lower()
                assert caption[0].isupper()
                assert caption.endswith(".")
                assert 3 <= len(caption.split()) <= 90
    assert len(captions) > 350


def test_captions_of_normal_views_name_no_finding() -> None:
    normal_studies = [
        study
        for patient in World(3).patients(120)
        for study in patient.studies
        if not study.findings
    ]
    assert len(normal_studies) > 20
    for study in normal_studies:
        for view in study.views:
            rng = generator(*view.key, 1)
            assert DENIAL.search(compose_caption(rng, study, view))
            for sentence in compose_references(rng, view, 2):
                assert DENIAL.search(sentence) or not any(word in sentence for word in WORDS)
                assert "2" in sentence


def test_captions_of_slices_agree_with_the_slice(articles: list[list[Figure]]) -> None:
    numbers = {"no": 0, "a": 1, "two": 2, "three": 3}
    counts: Counter[int] = Counter()
    for figure in (
        figure for article in articles for figure in article if figure.ct_mr_slice is not None
    ):
        part = figure.ct_mr_slice
        assert part is not None
        for text in (figure.caption, *figure.references):
            if not text:
                continue
            match = re.search(
                r"\b(no|a|two|three) (?:single |focal )?(?:(?:left|right)-sided )?(?:[\d.]+ cm "
                r")?(?:mass|lesion)",
                text,
            )
            assert match, text
            assert numbers[match[1]] == len(part.masses)
            assert part.organ in text
            assert ("CT" in text or "computed tomography" in text) == (part.modality == "CT")
            assert ("MRI" in text or "magnetic resonance" in text) == (part.modality == "MRI")
            if part.masses:
                assert f"{part.diameter:g} cm" in text
                assert part.side in text
            counts[len(part.masses)] += 1
    assert min(counts[count] for count in range(4)) > 20


# Articles


def test_articles_are_reproducible_with_one_figure_per_view() -> None:
    for index in range(20):
        patient = World(SEED).patient(index)
        figures = article_figures(patient)
        assert figures == article_figures(World(SEED).patient(index))
        views = [view for study in patient.studies for view in study.views]
        assert [figure.view for figure in figures if figure.view is not None] == views
        assert [figure.number for figure in figures] == list(range(1, len(figures) + 1))


def test_defects_occur_in_their_shares(articles: list[list[Figure]]) -> None:
    figures = [figure for article in articles for figure in article]
    films = [figure for figure in figures if figure.view is not None]
    assert 0.01 < np.mean([not figure.caption for figure in films]) < 0.035
    assert 0.004 < np.mean([figure.duplicated for figure in films]) < 0.02
    assert 0.04 < np.mean([not article[-1].radiology for article in articles]) < 0.13
    assert 0.35 < np.mean([bool(figure.references) for figure in films]) < 0.75
    assert max(len(figure.references) for figure in films) == 4
    slices = sum(figure.ct_mr_slice is not None for figure in figures)
    assert 0.55 < slices / len({figure.study.key for figure in films if figure.study}) < 0.65
    unreadable = np.cumsum(
        [sum(figure.file != "intact" for figure in article) for article in articles]
    )
    total = np.cumsum([len(article) for article in articles])
    assert unreadable[-1] == 4
    assert (unreadable / total).max() < 0.01  # below the default budget of a conversion


def test_files_are_intact_missing_or_empty(articles: list[list[Figure]]) -> None:
    assert figure_bytes(articles[77][0], SIZE, ".jpg") is None
    assert figure_bytes(articles[133][0], SIZE, ".png") == b""
    chart = next(figure for article in articles for figure in article if not figure.radiology)
    slice_ = next(
        figure for article in articles for figure in article if figure.ct_mr_slice is not None
    )
    for figure in (articles[0][0], slice_, chart):
        for suffix in (".jpg", ".png"):
            data = figure_bytes(figure, SIZE, suffix)
            assert data is not None
            image_HW = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
            assert image_HW.ndim == 2
            assert max(image_HW.shape) == SIZE
            assert image_HW.std() > 5


# ROCO


def test_roco_has_the_files_of_the_release(roco_root: Path) -> None:
    names = set(content(roco_root))
    tables = ("captions", "keywords", "cuis", "semtypes", "dlinks", "licences")
    kinds = [
        f"data/{split}/{kind}"
        for split in ("train", "validation", "test")
        for kind in ("radiology", "non-radiology")
    ]
    expected = {f"{kind}/{table}.txt" for kind in kinds for table in tables}
    expected |= {
        f"roco_references/roco_{split}_references.jsonl" for split in ("train", "val", "test")
    }
    assert names - {name for name in names if "/images/" in name} == expected | {
        "phantom.json",
        "phantom_truth.jsonl.gz",
    }
    patterns = {
        "captions": r"ROCO_\d{5,}\t .*",
        "keywords": r"ROCO_\d{5,}\t(\t[a-z]+)*",
        "cuis": r"ROCO_\d{5,}\t(\tC\d{7})*",
        "semtypes": r"ROCO_\d{5,}\t(\tT\d{3}\t[A-Z][A-Za-z ]+)*",
        "dlinks": r"ROCO_\d{5,}\twget -r ftp://\S+/PMC\d{8}\.tar\.gz -P "
        r"/path/to/Dir\tphantom-g\d{3}\.jpg",
        "licences": r"ROCO_ID,PMC_ID,CC|ROCO_\d{5,},PMC\d{8}_phantom-g\d{3}\.jpg,CC BY",
    }
    for kind in kinds:
        for table, pattern in patterns.items():
            for line in (roco_root / kind / f"{table}.txt").read_text().splitlines():
                assert re.fullmatch(pattern, line), (table, line)


@pytest.mark.usefixtures("forked_workers")
def test_roco_is_reproducible(roco_root: Path, tmp_path: Path) -> None:
    again = write_roco(
        tmp_path / "again", patients=PATIENTS, seed=SEED, size=SIZE, split=SPLIT, workers=2
    )
    assert content(again) == content(roco_root)
    other = write_roco(tmp_path / "other", patients=2, seed=SEED + 1, size=SIZE, workers=1)
    table = "data/train/radiology/captions.txt"
    assert (other / table).read_bytes() not in (roco_root / table).read_bytes()
    with raises(CorpusError, "exists", "out", names="another patients"):
        write_roco(again, patients=3, seed=SEED, size=SIZE, split=SPLIT)
    with raises(ConfigError, "out_of_range", "size"):
        write_roco(tmp_path / "none", size=5)


def test_roco_converter_reads_all_figures(
    roco_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    plan = roco.ROCO(root=roco_root, references=roco_root / "roco_references").plan(
        deid
    )  # raises unless splits are disjoint
    figures = {}
    for patient in World(SEED).patients(PATIENTS):
        split = ("train", "validation", "test")[split_of(patient.index, SEED, SPLIT)]
        for figure in article_figures(patient):
            if figure.radiology:
                key = deid.image(f"ROCO_{patient.index * 33 + figure.number:05d}")
                figures[key] = (split, deid.patient(article_id(patient)), figure)
    assert {record.sample.key for record in plan.records} == set(figures)
    for record in plan.records:
        split, article, figure = figures[record.sample.key]
        assert (record.sample.split, record.sample.patient) == (split, article)
        assert record.sample.sections.get("caption", "") == figure.caption
        assert set(record.sample.sections.values()) <= {
            figure.caption,
            *(" ".join(r.split()) for r in figure.references),
        }
    manifests = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1), ShardOptions(short_side=32)
    )
    kept = sum(
        manifest.samples + sum(manifest.excluded.values()) for manifest in manifests.values()
    )
    assert kept == len(figures)
    others = roco.ROCO(root=roco_root, non_radiology=True).plan(deid)
    charts = [
        f for p in World(SEED).patients(PATIENTS) for f in article_figures(p) if not f.radiology
    ]
    assert len(others.records) == len(charts) > 0


# MedICaT


def test_medicat_rows_have_the_fields_of_the_release(medicat_root: Path) -> None:
    (table,) = medicat_root.glob("s2_full_figures_oa_nonroco_combined_medical_top4_public.jsonl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    fields = ("pdf_hash", "fig_key", "fig_uri", "s2_caption", "s2orc_caption", "s2orc_references",
        "radiology", "scope",
              "predicted_type", "oa_info")  # fmt: skip
    for row in rows:
        assert set(row) == set(fields)
        assert re.fullmatch(r"[0-9a-f]{40}", row["pdf_hash"])
        assert row["fig_uri"].endswith(f"-{row['fig_key']}-1.png")
        assert (medicat_root / "figures" / f"{row['pdf_hash']}_{row['fig_uri']}").is_file()
        assert set(row["oa_info"]["oa"]) == {
            "is_oa", "oa_status", "journal_is_oa", "journal_is_in_doaj", "license", "provenance",
        }  # fmt: skip
    assert {row["radiology"] for row in rows} == {True, False}
    assert any(row["s2_caption"] == "" and row["s2orc_caption"] for row in rows)
    assert {type(row["s2orc_references"]) for row in rows} == {list, type(None)}
    assert len({row["pdf_hash"] for row in rows}) == PATIENTS


def test_medicat_converter_reads_all_figures(
    medicat_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    everything = medicat.MedICaT(root=medicat_root).plan(deid)
    plan = medicat.MedICaT(root=medicat_root, radiology_only=True).plan(deid)
    figures = [
        figure for patient in World(SEED).patients(PATIENTS) for figure in article_figures(patient)
    ]
    assert len(everything.records) == len(figures)
    assert plan.excluded == {"not_radiology": sum(not figure.radiology for figure in figures)}
    manifests = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1), ShardOptions(short_side=32)
    )
    captions = {f"Figure {figure.number}. {figure.caption}" for figure in figures}
    for split in manifests:
        source = ShardSource(tmp_path / "out" / split)
        for position in range(len(source)):
            sample = source.sample(position)
            assert sample.sections.get("caption") in captions | {None}
            assert sample.extra["radiology"] is True
            assert source.pixels(position).std() > 5


@pytest.mark.usefixtures("forked_workers")
def test_medicat_is_reproducible(medicat_root: Path, tmp_path: Path) -> None:
    again = write_medicat(tmp_path / "again", patients=PATIENTS, seed=SEED, size=SIZE, workers=2)
    assert content(again) == content(medicat_root)


def test_commands_write_corpora_and_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--patients", "8", "--size", "48", "--workers", "1"]
    for corpus, options in (("roco", ["--splits", "repaired"]), ("medicat", ["--radiology-only"])):
        root, out = tmp_path / corpus, tmp_path / f"{corpus}-shards"
        cli.main(["phantom", corpus, "--out", str(root), *small])
        assert f"Next: medvl shards {corpus} --root {root}" in capsys.readouterr().out
        cli.main(
            ["shards", corpus, "--root", str(root), "--out", str(out), "--workers", "1", *options]
        )
        assert "train: " in capsys.readouterr().out
        assert Manifest.read(out / "train").samples > 5
        cli.main(["verify", str(out)])
        assert "not the full release" in capsys.readouterr().out
