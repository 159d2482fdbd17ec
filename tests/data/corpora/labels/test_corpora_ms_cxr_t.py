"""MS-CXR-T: the converter on fixtures in the published layout and on the phantom, and the order
of MIMIC's studies.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.labels import ms_cxr_t
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.loading.studies import prior_positions
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.errors import CorpusError
from medvl.phantom import World, write_mimic_cxr_jpg, write_ms_cxr_t
from medvl.schema import CHANGES

IMAGES = [f"{number:08x}-bde0afdd-112c0b34-7bc16630-4e384014" for number in range(4)]
NAMES = [f"p10/p10000032/s5041426{number}/{image}" for number, image in enumerate(IMAGES)]
HEADER = (
    "dicom_id,previous_dicom_id,subject_id,study_id,previous_study_id,consolidation_progression,edema_progression,"
    "pleural_effusion_progression,pneumonia_progression,pneumothorax_progression"
)


def write(root: Path, *rows: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / ms_cxr_t.TABLE).write_text("\n".join([HEADER, *rows]) + "\n")
    return root


def change_in(sample: Any) -> dict[str, str]:
    return sample.extra["change"]


def row(current: int, previous: int, changes: str) -> str:
    return (
        f"{NAMES[current]},{NAMES[previous]},10000032,5041426{current},5041426{previous},{changes}"
    )


def test_rows_form_pairs_of_samples(tmp_path: Path, deid: Deidentifier) -> None:
    rows = (
        row(1, 0, "stable,,worsening,,"),
        row(2, 1, ",improving,,,"),
        row(2, 0, "worsening,,,,"),
        row(3, 2, ",,,,"),
    )
    plan = ms_cxr_t.MSCXRT(root=write(tmp_path, *rows)).plan(deid)
    keys = [deid.image(image) for image in IMAGES]
    samples = {sample.key: sample for sample in plan.iter_samples()}
    again = f"{keys[2]}-{keys[0]}"
    assert set(samples) == {*keys[:3], again}
    assert plan.excluded == {"no_label": 1}
    assert samples[keys[0]].extra == {}
    assert samples[keys[1]].extra == {
        "change": {"Consolidation": "stable", "Pleural Effusion": "worsening"},
        "prior": keys[0],
    }
    assert samples[keys[2]].extra == {"change": {"Edema": "improving"}, "prior": keys[1]}
    assert samples[again].extra == {"change": {"Consolidation": "worsening"}, "prior": keys[0]}
    assert samples[keys[1]].image == tmp_path / "files" / f"{NAMES[1]}.jpg"
    assert {(sample.split, sample.patient) for sample in samples.values()} == {
        ("test", deid.patient("10000032"))
    }


@pytest.mark.parametrize(
    ("damaged", "field"),
    [
        (row(1, 0, "better,,,,"), "consolidation_progression"),
        (row(1, 0, "stable,,,,").replace("p10/p10000032/s50414261/", ""), "dicom_id"),
        (
            row(1, 0, "stable,,,,").replace("p10/p10000032/s50414260", "p10/p10000033/s50414260"),
            "previous_dicom_id",
        ),
    ],
)
def test_damaged_rows_are_refused(
    tmp_path: Path, deid: Deidentifier, damaged: str, field: str
) -> None:
    with raises(CorpusError, "malformed", field, names=ms_cxr_t.TABLE):
        ms_cxr_t.MSCXRT(root=write(tmp_path, damaged)).plan(deid)


def test_phantom_changes_agree_with_its_findings_and_convert(tmp_path: Path) -> None:
    write_ms_cxr_t(tmp_path / "corpus", patients=12, seed=33, size=48, workers=1)
    cli.main(["shards", "ms-cxr-t", "--root", str(tmp_path / "corpus"), "--out",
        str(tmp_path / "shards"),
              "--short-side", "32", "--workers", "1"])  # fmt: skip
    source = ShardSource(tmp_path / "shards" / "test")
    samples = [source.sample(position) for position in range(len(source))]
    prior_N = prior_positions(source)
    pairs = [
        (sample, samples[prior])
        for sample, prior in zip(samples, prior_N, strict=True)
        if prior >= 0
    ]
    assert len(pairs) > 5
    changes = {value for sample, _ in pairs for value in change_in(sample).values()}
    assert changes == set(CHANGES)
    assert all(
        sample.patient == prior.patient and sample.study != prior.study for sample, prior in pairs
    )
    assert all(
        "prior" not in sample.extra
        for sample, prior in zip(samples, prior_N, strict=True)
        if prior < 0
    )
    labels = [
        (before.labels["Pneumothorax"], after.labels["Pneumothorax"])
        for patient in World(33).patients(12)
        for before, after in zip(patient.studies, patient.studies[1:], strict=False)
    ]
    named = [change_in(sample).get("Pneumothorax") for sample, _ in pairs]
    assert len([change for change in named if change]) == sum(any(pair) for pair in labels)


def test_phantom_mimic_shards_hold_the_order_of_studies(tmp_path: Path, deid: Deidentifier) -> None:
    write_mimic_cxr_jpg(
        tmp_path / "corpus", patients=8, seed=3, size=48, split=(1.0, 0.0, 0.0), workers=1
    )
    plan = mimic_cxr.MimicCXR(root=tmp_path / "corpus", split="train").plan(deid)
    write_shards(plan, deid, ShardRun(out=tmp_path / "shards", workers=1))
    source = ShardSource(tmp_path / "shards" / "train")
    samples = {sample.key: sample for sample in map(source.sample, range(len(source)))}
    prior_N = prior_positions(source)
    for patient in World(3).patients(8):
        for number, study in enumerate(patient.studies):
            assert all(samples[deid.image(view.dicom_id)].order == number for view in study.views)
    priors = sum(len(patient.studies[1:]) > 0 for patient in World(3).patients(8))
    assert (prior_N >= 0).sum() >= priors > 0
