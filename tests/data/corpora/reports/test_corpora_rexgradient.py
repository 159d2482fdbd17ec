"""ReXGradient-160K: the converter on fixtures in the published layout and on its phantom."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.corpora.common import formats
from medvl.data.corpora.reports.rexgradient import ReXGradient
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, sample_to_json
from medvl.errors import CorpusError
from medvl.phantom import write_rexgradient

FOLDER = "../deid_png/PT1/ACC7/studies/1.2.7/series/1.2.7.1/instances"
STUDY: dict[str, Any] = {
    "StudyInstanceUid": "1.2.7", "PatientID": "PT1", "AccessionNumber": "ACC7",
    "PatientSex": "F", "PatientAge": "007Y", "StudyDate": "20150301", "Indication": "Fever.",
    "Comparison": "None", "Findings": "Lungs are clear.", "Impression": "nan",
    "ImagePath": [f"{FOLDER}/1.png", f"{FOLDER}/2.png"], "ImageViewPosition": ["PA", "LL"],
    "ImageShape": [[9, 9], [9, 9]],
}  # fmt: skip


def write(root: Path, *studies: dict[str, Any], split: str = "train") -> Path:
    folder = root / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    content = {str(number): study for number, study in enumerate(studies)}
    (folder / f"{split}_metadata_view_position.json").write_text(json.dumps(content, indent=1))
    return root


def with_views(*spellings: str | None) -> dict[str, Any]:
    paths = [f"{FOLDER}/{number}.png" for number in range(len(spellings))]
    shapes = [[9, 9]] * len(spellings)
    return STUDY | {"ImagePath": paths, "ImageViewPosition": [*spellings], "ImageShape": shapes}


def test_samples_have_sections_and_order(tmp_path: Path, deid: Deidentifier) -> None:
    other = {"StudyInstanceUid": "1.2.6", "StudyDate": 20140101, "PatientAge": "005M",
             "PatientSex": "O", "Impression": "Normal."}  # fmt: skip
    path = f"{FOLDER.replace('1.2.7', '1.2.6')}/1.png"
    lists = {"ImagePath": [path], "ImageViewPosition": ["AP"], "ImageShape": [[9, 9]]}
    write(tmp_path, STUDY, STUDY | other | lists)
    lists["ImagePath"] = [path.replace("PT1", "PT9")]
    write(tmp_path, STUDY | lists | {"PatientID": "PT9"}, split="valid")
    plan = ReXGradient(root=tmp_path).plan(deid)
    first, lateral, earlier, valid = plan.iter_samples()
    assert first.sections == {"indication": "Fever.", "findings": "Lungs are clear."}
    assert earlier.sections["impression"] == "Normal."
    assert (first.view, lateral.view, earlier.view) == ("PA", "LATERAL", "AP")
    assert (first.sex, first.age, first.order) == ("F", 7, 1)
    assert (earlier.sex, earlier.age, earlier.order) == (None, 0, 0)
    assert first.image == tmp_path / FOLDER.removeprefix("../") / "1.png"
    assert first.patient == lateral.patient == earlier.patient == deid.patient("PT1")
    assert first.study == lateral.study != earlier.study
    assert (first.split, valid.split) == ("train", "validate")
    stored = sample_to_json(first)
    assert not any(text in stored for text in (b"PT1", b"ACC7", b"2015", b"1.2.7"))


def test_views_are_mapped_left_out_and_counted(tmp_path: Path, deid: Deidentifier) -> None:
    spellings = ("POSTERO_ANTERIOR", "ap axial", "AP_LORDOTIC", "RL", "RAO", "UNKNOWN", "N/A",
                 None, "PICC LINE", "KUB", "Abdomen AP", "SWIMMERS  VIEW")  # fmt: skip
    write(tmp_path, with_views(*spellings))
    plan = ReXGradient(root=tmp_path).plan(deid)
    views = [sample.view for sample in plan.iter_samples()]
    assert views == ["PA", "AP", "AP", "LATERAL", "RAO", *[None] * 5]
    assert plan.excluded == {"not_chest": 2}
    of_views = {name: count for name, count in plan.warnings.items() if "view" in name}
    assert of_views == {"unknown_view": 4, "unlisted_view_swimmers_view": 1}
    frontal = ReXGradient(root=tmp_path, views=("PA", "AP")).plan(deid)
    assert len(frontal.records) == 3
    assert frontal.excluded == {"not_chest": 2, "view": 7}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ImageViewPosition": ["PA"]}, "ImageViewPosition"),
        ({"ImageShape": [[1, 1]]}, "ImageShape"),
        ({"ImagePath": "1.png"}, "ImagePath"),
        ({"ImagePath": ["../deid_png/../../x.png", f"{FOLDER}/2.png"]}, "ImagePath"),
        ({"ImagePath": ["/etc/x.png", f"{FOLDER}/2.png"]}, "ImagePath"),
    ],
)
def test_malformed_study_is_refused_with_its_place(
    fields: dict[str, Any], field: str, tmp_path: Path, deid: Deidentifier
) -> None:
    write(tmp_path, STUDY, STUDY | fields)
    with raises(CorpusError, "malformed", field, names="entry 2"):
        ReXGradient(root=tmp_path).plan(deid)


def test_metadata_is_found_or_refused(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found", "metadata"):
        ReXGradient(root=tmp_path).plan(deid)
    (tmp_path / "train_metadata.csv").write_text("id,Findings\n")
    with raises(CorpusError, "not_found", "metadata", names="train_metadata.csv"):
        ReXGradient(root=tmp_path).plan(deid)
    write(tmp_path / "download", STUDY)
    assert len(ReXGradient(root=tmp_path).plan(deid).records) == 2
    write(tmp_path / "other")
    other = ReXGradient(root=tmp_path, metadata=tmp_path / "other" / "metadata")
    assert len(other.plan(deid).records) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"1": 3}', '{"1": {}', '{"1": {} "2": {}}'),
        *('{"1": {"a": 1, "a": 2}}', '{"1": {"a": NaN}}', '{"\\q": {"a": 1}}'),
    ],
)
def test_damaged_json_is_refused(text: str, tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    (tmp_path / "metadata" / "train_metadata_view_position.json").write_text(text)
    with raises(CorpusError, "malformed"):
        ReXGradient(root=tmp_path).plan(deid)


def test_entries_span_the_parts_that_are_read(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, STUDY, with_views("AP"), STUDY | {"PatientID": "PT2"})
    whole = [sample.key for sample in ReXGradient(root=tmp_path).plan(deid).iter_samples()]
    monkeypatch.setattr(formats, "_CHUNK", 7)
    parts = [sample.key for sample in ReXGradient(root=tmp_path).plan(deid).iter_samples()]
    assert parts == whole
    assert len(whole) == 5


def test_phantom_converts(tmp_path: Path) -> None:
    root = write_rexgradient(tmp_path / "rex", patients=14, seed=2, size=64, workers=1)
    arguments = ["shards", "rexgradient", "--root", root, "--out", tmp_path / "out"]
    cli.main([*map(str, arguments), "--workers", "1"])
    manifests = [Manifest.read(folder) for folder in sorted((tmp_path / "out").glob("*/"))]
    assert {each.split for each in manifests} <= {"train", "validate", "test"}
    assert manifests[0].excluded_from_corpus == {"not_chest": 2}
    assert sum(each.warnings.get("unknown_view", 0) for each in manifests) > 0
    assert not [name for each in manifests for name in each.warnings if name.startswith("possible")]
    with pytest.raises(SystemExit):
        cli.main(["verify", str(tmp_path / "out"), "--full"])


def test_images_of_a_study_stay_without_a_missing_one(tmp_path: Path) -> None:
    root = write_rexgradient(tmp_path / "rex", patients=3, seed=2, size=64, workers=1)
    next(root.rglob("*.0.png")).unlink()
    arguments = ["shards", "rexgradient", "--root", root, "--out", tmp_path / "out"]
    cli.main([*map(str, arguments), "--workers", "1", "--max-skipped", "1"])
    manifests = [Manifest.read(folder) for folder in sorted((tmp_path / "out").glob("*/"))]
    assert [each.skipped for each in manifests if each.skipped] == [{"image_missing": 1}]
    assert sum(each.samples for each in manifests) == sum(each.planned for each in manifests) - 1
