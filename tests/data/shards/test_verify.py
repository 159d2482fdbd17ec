"""`medvl verify`: detection of damage and of shared patients."""

import json
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan, reseal

from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Index, Manifest
from medvl.data.shards.verify import check_against, compare_counts, verify_folder
from medvl.errors import SplitError


@pytest.fixture
def folder(tmp_path: Path, deid: Deidentifier) -> Path:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    return tmp_path / "out/train"


def test_intact_folder_has_no_problems(folder: Path) -> None:
    assert verify_folder(folder, decode=True).problems == ()


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.fault("F11")
@pytest.mark.parametrize("position", [0, 600, 5000])
def test_flipped_byte_changes_the_hash(folder: Path, position: int) -> None:
    flip_byte(folder / "lab-train-000001.tar", position)
    (problem,) = verify_folder(folder).problems
    assert problem.startswith("lab-train-000001.tar: sha256 differs from the manifest")


def test_missing_and_unlisted_files_are_reported(folder: Path) -> None:
    (folder / "lab-train-000001.tar").unlink()
    (folder / "lab-train-000009.tar").touch()
    assert verify_folder(folder).problems == (
        "lab-train-000001.tar is missing",
        "lab-train-000009.tar is not in the manifest",
    )


@pytest.mark.fault("F11")
def test_damage_with_a_matching_hash_is_reported(folder: Path) -> None:
    tar = folder / "lab-train-000000.tar"
    index = Index.read(tar.with_suffix(".index"))
    flip_byte(tar, int(index.meta[2][0]) + 3)  # within a sample's JSON
    reseal(folder, 0)
    (problem,) = verify_folder(folder).problems
    assert "key002.json" in problem
    flip_byte(tar, int(index.meta[2][0]) + 3)
    data = bytearray(tar.read_bytes())
    start, size = (int(number) for number in index.image[1])
    data[start : start + size] = bytes(size)  # all bytes of an image are zero
    tar.write_bytes(data)
    reseal(folder, 0)
    assert verify_folder(folder).problems == ()
    (problem,) = verify_folder(folder, decode=True).problems
    assert "key001.png" in problem


def test_index_of_another_tar_is_reported(folder: Path) -> None:
    (folder / "lab-train-000000.index").write_bytes(
        (folder / "lab-train-000001.index").read_bytes()
    )
    reseal(folder, 0)
    problems = verify_folder(folder).problems
    assert any("does not match the index" in problem for problem in problems)
    assert any("is in the index but not in the tar" in problem for problem in problems)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", 13, "12 samples in the shards, 13 in the manifest"),
        ("patients", ["patient0"], "6 patients in the shards, 1 in the manifest"),
        ("planned", 14, "14 images were planned, 12 are accounted for"),
        ("skipped_keys", [["key1", "x"]], "differs from their count"),
        ("label_names", ["odd"], "labels that are not in the manifest"),
        ("corpus", "other", "another key, corpus or split"),
    ],
)
def test_wrong_manifest_is_reported(folder: Path, field: str, value: object, message: str) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {field: value}))
    assert any(message in problem for problem in verify_folder(folder).problems)


@pytest.mark.fault("S11")
def test_check_against_refuses_shared_patients_and_other_salts(folder: Path) -> None:
    manifest = Manifest.read(folder)
    with raises(SplitError, "leak", names="6 patients"):
        check_against(manifest, manifest)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"salt": "other"}))
    with raises(SplitError, "mismatch", "salt"):
        check_against(manifest, Manifest.read(folder))
    (folder / "manifest.json").write_text(json.dumps(content | {"patients": ["someone else"]}))
    check_against(manifest, Manifest.read(folder))


def test_compare_counts_reports_differences(folder: Path) -> None:
    manifests = {"train": Manifest.read(folder)}
    assert compare_counts(manifests, {"images": 12, "train": 12}) == {}
    assert compare_counts(manifests, {"images": 100, "valid": 1}) == {
        "images": (12, 100),
        "valid": (0, 1),
    }


def test_verify_command_prints_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify", str(folder.parent), "--decode"])
    assert (
        "lab/train: 12 samples of 6 patients in 3 shards, 0 left out: intact"
        in capsys.readouterr().out
    )
    flip_byte(folder / "lab-train-000001.tar", 700)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["verify", str(folder)])
    captured = capsys.readouterr()
    assert "1 PROBLEMS" in captured.out
    assert "sha256 differs" in captured.out
    assert "is damaged" in captured.err
