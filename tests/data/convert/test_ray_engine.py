"""Conversion on Ray: the same bytes as on local processes, lost workers, a killed driver, and
settings.
"""

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.common.untrusted import InputFolders
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.ray_engine import RayEngine
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, ShardError

SMALL = dataclasses.replace(OPTIONS, samples_per_shard=2)


def test_settings_of_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "conflict", "address"):
        ShardRun(out=tmp_path, address="10.0.0.1:6379")
    with raises(ConfigError, "unknown_name", "engine"):
        ShardRun(out=tmp_path, engine="spark")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "missing", "engine", names="medvl[ray]"):
        ShardRun(out=tmp_path, engine="ray")


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        with raises(ConfigError, "not_found", "address"):
            next(RayEngine(address, None).run([]))


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """One Ray on this machine for all tests: its start takes seconds."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_ray_writes_the_bytes_of_local_processes(tmp_path: Path, deid: Deidentifier) -> None:
    """Also after a worker was killed, and after a shard was damaged; an error of a node ends the
    conversion.
    """
    large = {number: encode_png(textured(number, 1200, 1500)) for number in range(6, 12)}
    plan = make_plan(tmp_path / "images", bad={3: b"no image", **large})
    local = ShardRun(out=tmp_path / "local", workers=1, max_skipped=1)
    write_shards(plan, deid, local, SMALL)
    run = dataclasses.replace(local, out=tmp_path / "ray", workers=None, engine="ray")
    killer = threading.Thread(target=_kill_a_worker, daemon=True)
    killer.start()
    write_shards(plan, deid, run, SMALL)
    killer.join(timeout=1)
    assert not killer.is_alive(), "no worker was killed"
    expected = contents(tmp_path / "local/train")
    assert contents(tmp_path / "ray/train") == expected
    private = [contents(tmp_path / f"{name}-private") | {".lock": b""} for name in ("local", "ray")]
    assert private[0] == private[1]

    kept = (tmp_path / "ray/train/lab-train-000002.tar").stat().st_mtime_ns
    (tmp_path / "ray/train/lab-train-000001.tar").write_bytes(b"")
    write_shards(plan, deid, run, SMALL)
    assert contents(tmp_path / "ray/train") == expected
    assert (tmp_path / "ray/train/lab-train-000002.tar").stat().st_mtime_ns == kept

    with raises(ShardError, "not_found", "address", names="no-such-mount"):
        plan = dataclasses.replace(plan, folders=InputFolders((f"{tmp_path}/no-such-mount/",)))
        write_shards(plan, deid, dataclasses.replace(run, out=tmp_path / "other"), SMALL)


def _kill_a_worker() -> None:
    """Kill the first process below this one that builds a shard."""
    while True:
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if status.read_bytes().startswith(b"ray::_build_on_node") and _is_below(
                    int(status.parent.name)
                ):
                    os.kill(int(status.parent.name), signal.SIGKILL)
                    return
            except OSError:  # the process ended meanwhile
                continue
        time.sleep(0.002)


def _is_below(process: int) -> bool:
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        if process == os.getpid():
            return True
    return False
