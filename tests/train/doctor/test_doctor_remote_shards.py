"""`medvl doctor shards`: a store's access, latency and throughput, and what the cache holds."""

import json
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.object_store import Bucket
from helpers.shard_plans import OPTIONS, make_plan

from medvl.cli.main import main
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, StorageError
from medvl.train.doctor.checks import check_remote_shards, describe_remote_shards


def test_doctor_measures_remote_shards(
    bucket: Bucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ShardRun(out=tmp_path / "out", workers=1)
    write_shards(make_plan(tmp_path / "images", 10), Deidentifier(bytes(16)), run, OPTIONS)
    address = bucket.upload(tmp_path / "out/train", "lab")
    main(["doctor", "shards", address, "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["samples"], found["shards"], found["cache_limit"]) == (10, 2, 10**9)
    assert found["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "out/train").glob("*.tar")
    )
    assert found["sends_ranges"]
    assert found["latency_ms"] > 0
    assert "the cache has room for all shards" in capsys.readouterr().out
    monkeypatch.setenv("MEDVL_CACHE_SIZE", "1kB")
    assert "raise MEDVL_CACHE_SIZE" in describe_remote_shards(check_remote_shards(address))
    bucket.proxy.fail_always("expired")
    with raises(StorageError, "denied", names="credentials"):
        check_remote_shards(address)


def test_local_folders_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "wrong_type", "address"):
        check_remote_shards(tmp_path)
