"""ROCO and ROCOv2 converters on valid and invalid fixtures in the published layouts."""

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.figure_files import SMALL, write_image, write_table

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.figures import figure_sections
from medvl.data.corpora.figures import roco
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.data.splits import check_disjoint
from medvl.errors import ConfigError, CorpusError, SplitError


def splits_of(plan) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for record in plan.records:
        keys.setdefault(record.sample.split, []).append(record.sample.key)
    return keys


# The texts of a figure


def test_figure_sections_are_caption_and_references_in_order() -> None:
    warnings: Counter[str] = Counter()
    references = [
        "See Figure 1.",
        "the  nodule\n(Figure 1) grew",
        "Fig. 1",
        "the nodule (Figure 1) grew",
        "as seen in it",
    ]
    assert figure_sections(" A  chest\tradiograph. ", references, warnings) == {
        "caption": "A chest radiograph.",
        "reference-1": "See Figure 1.",
        "reference-2": "the nodule (Figure 1) grew",
        "reference-3": "as seen in it",
    }
    assert warnings == {"short_reference": 1, "repeated_reference": 1}


def test_figure_sections_have_no_entities_of_html() -> None:
    texts = [
        "nodule of &lt;&nbsp;3 mm, Broca&#39;s area",
        "a T1&amp;T2 &#x2013; AT&T &unknown; R&D &lt 5",
    ]
    assert figure_sections(texts[0], texts[1:], Counter()) == {
        "caption": "nodule of < 3 mm, Broca's area",
        "reference-1": "a T1&T2 \u2013 AT&T &unknown; R&D &lt 5",
    }


@pytest.mark.parametrize(
    ("caption", "reason"), [("", "blank_caption"), (None, "blank_caption"), ("CT", "short_caption")]
)
def test_figure_sections_drop_and_count_short_captions(caption: str | None, reason: str) -> None:
    warnings: Counter[str] = Counter()
    assert figure_sections(caption, None, warnings) == {}
    assert figure_sections(caption, ["a stone in the duct"], warnings) == {
        "reference-1": "a stone in the duct"
    }
    assert warnings == {reason: 2}


# ROCO

ROCO = {  # split -> rows of id, article, file, caption line, licence
    "train": [
        (
            "ROCO_00002",
            "PMC4083729",
            "AMHSR-4-14-g002.jpg",
            "\t Axial CT of the chest (arrow).",
            "CC BY-NC-SA",
        ),
        (
            "ROCO_00003",
            "PMC4083729",
            "AMHSR-4-14-g003.jpg",
            "\t \tCoronal CT of the same chest.",
            "CC BY-NC-SA",
        ),
        ("ROCO_00005", "PMC2837471", "IJD2009-150251.001.jpg", "\t ", "NO-CC CODE"),
        ("ROCO_00007", "PMC317358", "1476-7120-1-16-51.jpg", "", "CC BY"),
    ],
    "validation": [
        (
            "ROCO_00020",
            "PMC3970251",
            "CRIONM2014-931546.003.jpg",
            "\t Lateral view, naïve to treatment.",
            "CC BY",
        )
    ],
    "test": [
        (
            "ROCO_00001",
            "PMC5555555",
            "fig-1.jpg",
            "\t Postoperative radiograph of the pelvis.",
            "CC BY",
        )
    ],
}


def write_roco(
    root: Path, rows: dict[str, list[tuple[str, str, str, str, str]]] = ROCO, by_id: bool = True
) -> Path:
    for split, figures in rows.items():
        folder = root / split / "radiology"
        folder.mkdir(parents=True, exist_ok=True)
        lines = {
            name: [] for name in ("captions", "keywords", "cuis", "semtypes", "dlinks", "licences")
        }
        lines["licences"].append("ROCO_ID,PMC_ID,CC")
        for number, (figure, article, file, caption, licence) in enumerate(figures):
            lines["captions"].append(f"{figure}{caption}")
            lines["keywords"].append(f"{figure}\t\tchest\taxial")
            lines["cuis"].append(
                f"{figure}\t\tC0040405\tC0817096" if number == 0 else f"{figure}\t"
            )
            lines["semtypes"].append(f"{figure}\t\tT060\tDiagnostic Procedure")
            lines["licences"].append(f"{figure},{article}_{file},{licence}")
            link = (
                f"wget -r ftp://example.invalid/pub/pmc/oa_package/08/e5/{article}.tar.gz -P "
                f"/path/to/Dir"
            )
            lines["dlinks"].append(f"{figure}\t{link}\t{file}")
            write_image(
                folder / "images" / (f"{figure}.jpg" if by_id else f"{article}_{file}"),
                int(figure[5:]),
            )
        for name, text in lines.items():
            (folder / f"{name}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("by_id", [True, False], ids=["named by id", "named by the fetch script"])
def test_roco_samples_match_tables(tmp_path: Path, deid: Deidentifier, by_id: bool) -> None:
    write_roco(tmp_path / "roco" / "data", by_id=by_id)
    samples = {
        sample.key: sample for sample in roco.ROCO(root=tmp_path / "roco").plan(deid).iter_samples()
    }
    assert len(samples) == 6
    first = samples[deid.image("ROCO_00002")]
    assert (first.corpus, first.split, first.sections) == (
        "roco",
        "train",
        {"caption": "Axial CT of the chest (arrow)."},
    )
    assert first.patient == deid.patient("PMC4083729") == samples[deid.image("ROCO_00003")].patient
    assert first.extra == {
        "cuis": ["C0040405", "C0817096"],
        "keywords": ["chest", "axial"],
        "licence": "CC BY-NC-SA",
    }
    assert samples[deid.image("ROCO_00003")].sections == {
        "caption": "Coronal CT of the same chest."
    }
    assert samples[deid.image("ROCO_00020")].sections == {
        "caption": "Lateral view, naïve to treatment."
    }
    assert not samples[deid.image("ROCO_00005")].sections
    assert all(sample.image is not None and sample.image.is_file() for sample in samples.values())
    for sample in samples.values():
        assert "PMC" not in sample_to_json(sample).decode()
        assert "ROCO_" not in sample_to_json(sample).decode()


def test_roco_repairs_and_skips_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_roco(tmp_path)
    captions = root / "train/radiology/captions.txt"
    text = captions.read_text()
    line = text.splitlines()[0]
    captions.write_text(
        f"{text}\n{line}\nROCO_00003\t Another caption for it.\nROCO_99999\t A figure without "
        f"an article.\n"
    )
    (root / "train/radiology/images/ROCO_00003.jpg").unlink()
    (root / "train/radiology/images/ROCO_00002.jpg").write_bytes(b"")
    plan = roco.ROCO(root=root).plan(deid)
    assert plan.warnings == {"blank_caption": 2}
    assert plan.excluded == {"duplicate_line": 1, "second_caption_ignored": 1, "no_article": 1}
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=2)
    manifest = write_shards(plan, deid, run, SMALL)["train"]
    assert (manifest.planned, manifest.samples) == (4, 0)
    assert manifest.excluded == {"no_text": 2}
    assert manifest.skipped == {"empty": 1, "image_missing": 1}


def test_roco_articles_missing_in_licences_come_from_dlinks(
    tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_roco(tmp_path, by_id=False)
    complete = roco.ROCO(root=root).plan(deid)
    licences = root / "train/radiology/licences.txt"
    licences.write_text("\n".join(licences.read_text().splitlines()[:2]) + "\n")
    (root / "test/radiology/licences.txt").unlink()
    again = roco.ROCO(root=root).plan(deid)
    assert [r.sample.patient for r in again.records] == [r.sample.patient for r in complete.records]
    assert [r.sample.image for r in again.records] == [r.sample.image for r in complete.records]
    (root / "test/radiology/dlinks.txt").unlink()
    with raises(CorpusError, "not_found"):
        roco.ROCO(root=root).plan(deid)


def test_roco_references_are_joined_by_article_and_file(tmp_path: Path, deid: Deidentifier) -> None:
    root, folder = write_roco(tmp_path / "roco"), tmp_path / "roco_references"
    folder.mkdir()
    rows = [
        {
            "roco_image_id": "PMC4083729_AMHSR-4-14-g002.jpg",
            "gorc_references": ["The mass (Fig. 2) is new.", "It grew since then."],
        },
        {"roco_image_id": "PMC317358_1476-7120-1-16-51.jpg", "gorc_references": None},
    ]
    (folder / "roco_train_references.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    samples = {
        record.sample.key: record.sample
        for record in roco.ROCO(root=root, references=folder).plan(deid).records
    }
    assert dict(samples[deid.image("ROCO_00002")].sections) == {
        "caption": "Axial CT of the chest (arrow).",
        "reference-1": "The mass (Fig. 2) is new.",
        "reference-2": "It grew since then.",
    }
    assert not samples[deid.image("ROCO_00007")].sections
    (folder / "roco_train_references.jsonl").write_text(
        json.dumps(rows[0] | {"gorc_references": "one text"})
    )
    with raises(CorpusError, "wrong_type", "gorc_references"):
        roco.ROCO(root=root, references=folder).plan(deid)
    with raises(CorpusError, "not_found", "references"):
        roco.ROCO(root=root, references=root).plan(deid)


SHARED = {
    "train": [
        ("ROCO_00001", "PMC1", "a.jpg", "\t One of two figures.", "CC BY"),
        ("ROCO_00002", "PMC2", "a.jpg", "\t One of three figures.", "CC BY"),
        ("ROCO_00003", "PMC3", "a.jpg", "\t The only figure.", "CC BY"),
    ],
    "validation": [
        ("ROCO_00011", "PMC1", "b.jpg", "\t Two of two figures.", "CC BY"),
        ("ROCO_00012", "PMC2", "b.jpg", "\t Two of three figures.", "CC BY"),
    ],
    "test": [("ROCO_00021", "PMC2", "c.jpg", "\t Three of three figures.", "CC BY")],
}


def test_roco_official_splits_with_shared_articles_raise(
    tmp_path: Path, deid: Deidentifier
) -> None:
    write_roco(tmp_path, SHARED)
    with raises(SplitError, "leak", "splits", names="3 of 6 figures"):
        roco.ROCO(root=tmp_path).plan(deid)
    with raises(ConfigError, "unknown_name", "splits"):
        roco.ROCO(root=tmp_path, splits="other").plan(deid)


def test_roco_repaired_splits_keep_held_out_splits_complete(
    tmp_path: Path, deid: Deidentifier
) -> None:
    write_roco(tmp_path, SHARED)
    plan = roco.ROCO(root=tmp_path, splits="repaired").plan(deid)
    ids = {deid.image(row[0]): row[0] for rows in SHARED.values() for row in rows}
    by_split = {split: [ids[key] for key in keys] for split, keys in splits_of(plan).items()}
    assert by_split == {
        "train": ["ROCO_00003"],
        "validation": ["ROCO_00011"],
        "test": ["ROCO_00021"],
    }
    assert plan.excluded == {"article_in_test": 2, "article_in_validation": 1}
    out = write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), SMALL)
    assert {split: manifest.samples for split, manifest in out.items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }


def test_roco_splits_by_article_keep_every_figure(tmp_path: Path, deid: Deidentifier) -> None:
    rows = {
        "train": [
            (f"ROCO_{n:05d}", f"PMC{n // 3}", "a.jpg", f"\t The figure number {n}.", "CC BY")
            for n in range(240)
        ]
    }
    write_roco(tmp_path, rows)
    plan = roco.ROCO(root=tmp_path, splits="by-article").plan(deid)
    assert len(plan.records) == 240
    patients: dict[str, set[str]] = {}
    for record in plan.records:
        patients.setdefault(record.sample.split, set()).add(record.sample.patient)
    assert set(patients) == {"train", "validation", "test"}
    check_disjoint(patients, "roco")
    assert 0.7 < len(patients["train"]) / 80 < 0.9


def test_roco_malformed_layout_raises(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found"):
        roco.ROCO(root=tmp_path).plan(deid)
    root = write_roco(tmp_path)
    with raises(CorpusError, "not_found"):
        roco.ROCO(root=root, non_radiology=True).plan(deid)
    (root / "test/radiology").rename(root / "test/non-radiology")
    assert roco.ROCO(root=root, non_radiology=True).plan(deid).corpus == "roco-non-radiology"
    captions = root / "train/radiology/captions.txt"
    captions.write_text(captions.read_text() + "a caption that ran on\n")
    with raises(CorpusError, "malformed", names="captions.txt, line 5"):
        roco.ROCO(root=root).plan(deid)
    captions.write_bytes(b"ROCO_00001\t \xff\xfe")
    with raises(CorpusError, "malformed"):
        roco.ROCO(root=root).plan(deid)


# ROCOv2

ROCO_V2 = {
    "train": [
        (
            "ROCOv2_2023_train_000001",
            "Head CT demonstrating left parotiditis.",
            "C0040405;C0018670",
            "PMC7000001",
        )
    ],
    "valid": [
        ("ROCOv2_2023_valid_000001", 'A "double" line, with commas.', "C1306645", "PMC7000002")
    ],
    "test": [
        (
            "ROCOv2_2023_test_000001",
            "Ultrasound of the left kidney.\nSecond line.",
            "",
            "PMC7000003",
        )
    ],
}


@pytest.fixture
def roco_v2_root(tmp_path: Path) -> Path:
    root = tmp_path / "rocov2"
    licences = []
    for split, rows in ROCO_V2.items():
        for figure, _, _, article in rows:
            write_image(root / f"{split}_images" / split / f"{figure}.jpg", len(licences))
            link = f"https://example.invalid/pmc/articles/{article}/"
            licences.append([figure, article, "CC BY [Somebody et al. (2022)]", link])
        write_table(
            root / f"{split}_captions.csv", ["ID", "Caption"], [[row[0], row[1]] for row in rows]
        )
        write_table(
            root / f"{split}_concepts.csv", ["ID", "CUIs"], [[row[0], row[2]] for row in rows]
        )
    write_table(root / "license_information.csv", ["ID", "PMCID", "Attribution", "Link"], licences)
    return root


def test_roco_v2_samples_match_tables(roco_v2_root: Path, deid: Deidentifier) -> None:
    samples = list(roco.ROCO(root=roco_v2_root).plan(deid).iter_samples())
    assert [sample.split for sample in samples] == ["train", "valid", "test"]
    assert [sample.sections["caption"] for sample in samples] == [
        "Head CT demonstrating left parotiditis.",
        'A "double" line, with commas.',
        "Ultrasound of the left kidney. Second line.",
    ]
    assert samples[0].extra == {"cuis": ["C0040405", "C0018670"], "licence": "CC BY"}
    assert samples[2].extra == {"licence": "CC BY"}
    assert [sample.patient for sample in samples] == [
        deid.patient(f"PMC700000{n}") for n in (1, 2, 3)
    ]
    assert {sample.corpus for sample in samples} == {"rocov2"}
    assert all(sample.image is not None and sample.image.is_file() for sample in samples)


def test_roco_v2_missing_article_or_table_is_reported(
    roco_v2_root: Path, deid: Deidentifier
) -> None:
    table = roco_v2_root / "license_information.csv"
    rows = table.read_text().splitlines()
    table.write_text("\n".join([rows[0], rows[1].replace("PMC", "PM"), *rows[2:]]) + "\n")
    assert roco.ROCO(root=roco_v2_root).plan(deid).excluded == {"no_article": 1}
    with raises(ConfigError, "unsupported", "non_radiology"):
        roco.ROCO(root=roco_v2_root, non_radiology=True).plan(deid)
    table.unlink()
    with raises(CorpusError, "not_found"):
        roco.ROCO(root=roco_v2_root).plan(deid)


def test_both_roco_releases_hash_articles_equally(
    tmp_path: Path, roco_v2_root: Path, deid: Deidentifier
) -> None:
    figure = ("ROCO_00001", "PMC7000003", "gr1.jpg", "\t Ultrasound of the left kidney.", "CC BY")
    (first,) = roco.ROCO(root=write_roco(tmp_path / "roco", {"test": [figure]})).plan(deid).records
    assert first.sample.patient in {
        record.sample.patient for record in roco.ROCO(root=roco_v2_root).plan(deid).records
    }
