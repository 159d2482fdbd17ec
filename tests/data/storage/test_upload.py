"""Shards uploaded to an object store, by the conversion and by `medvl upload`."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.object_store import Bucket
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.cli.main import main
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.upload import upload_shards
from medvl.data.shards.verify import verify_folder
from medvl.errors import ConfigError, ShardError, StorageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    deid = Deidentifier(bytes(16))
    write_shards(
        make_plan(tmp_path / "images", 10), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    return tmp_path / "out"


def test_conversion_writes_to_an_address(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    run = ShardRun(out=Path(f"{bucket.address}/lab"), staging=tmp_path / "staging", workers=1)
    for _ in range(2):  # the second time everything is there
        manifests = write_shards(
            make_plan(tmp_path / "images", 10), Deidentifier(bytes(16)), run, OPTIONS
        )
        expected = contents(folder / "train")
        assert {f"lab/train/{name}" for name in expected} == set(bucket.objects())
        assert all(bucket.get(f"lab/train/{name}") == data for name, data in expected.items())
        assert Manifest.read(f"{bucket.address}/lab/train") == manifests["train"]
    assert (tmp_path / "staging/lab-private").is_dir()


def test_remote_output_needs_a_local_folder(tmp_path: Path) -> None:
    with raises(ConfigError, "missing", "staging"):
        ShardRun(out=Path("s3://bucket/lab"))
    with raises(ConfigError, "conflict", "part"):
        ShardRun(out=Path("s3://bucket/lab"), staging=tmp_path, part="1/2")
    with raises(ConfigError, "conflict", "staging"):
        ShardRun(out=tmp_path / "out", staging=tmp_path)
    with raises(ConfigError, "unsupported", "address"):
        upload_shards(tmp_path, "https://host/lab")


def test_interrupted_upload_has_no_manifest_and_resumes(
    bucket: Bucket, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    bucket.proxy.fail_always("denied", "lab-train-000001.index")
    with raises(StorageError, "denied", names="lab-train-000001.index"):
        upload_shards(folder, f"{bucket.address}/lab")
    assert "lab/train/manifest.json" not in bucket.objects()
    with raises(ShardError, "not_found"):
        Manifest.read(f"{bucket.address}/lab/train")
    bucket.proxy.heal()
    bucket.put(
        "lab/train/lab-train-000000.tar", bytes(len(bucket.get("lab/train/lab-train-000000.tar")))
    )
    bucket.proxy.requests.clear()
    main(["upload", str(folder), f"{bucket.address}/lab"])
    sent = [
        path.rpartition("/")[2].partition("?")[0]
        for method, path, _ in bucket.proxy.requests
        if method == "PUT"
    ]
    assert sent.count("lab-train-000000.tar") == 1  # had the right size and other bytes
    assert sent[-1] == "manifest.json"
    assert "lab/train" in capsys.readouterr().out
    assert not verify_folder(f"{bucket.address}/lab/train").problems


def test_other_shards_are_not_replaced(bucket: Bucket, folder: Path) -> None:
    upload_shards(folder / "train", f"{bucket.address}/lab")
    path = folder / "train/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": "other"}))
    with raises(ConfigError, "exists", "address"):
        upload_shards(folder / "train", f"{bucket.address}/lab")


def test_damage_on_either_side_is_found(
    bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REMOTE_RETRIES", "1")
    bucket.proxy.fail_always("reset", "lab-train-000000.tar")
    with raises(StorageError, "network", names="lab-train-000000.tar"):
        upload_shards(folder, f"{bucket.address}/lab")
    bucket.proxy.heal()
    tar = next((folder / "train").glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    with raises(ShardError, "mismatch", names=tar.name):
        upload_shards(folder, f"{bucket.address}/lab")
    assert not [key for key in bucket.objects() if key.endswith("manifest.json")]
    shutil.rmtree(folder / "train")
    with raises(ShardError, "not_found"):
        upload_shards(folder, f"{bucket.address}/lab")
