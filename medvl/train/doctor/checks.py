"""Checks before a run: of several nodes, and of remote shards."""

import contextlib
import dataclasses
import functools
import os
import platform
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import medvl
from medvl.common.files import RunLock, wait_for
from medvl.data.shards.source import ShardSource
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.data.storage.store import THREADS, map_threads, sends_ranges, stream
from medvl.errors import ConfigError, MedvlError
from medvl.train.parallel.distributed import RankInfo

# Checks of several nodes before a run: rendezvous, collectives, versions, clocks and the shared
# folder.
#
# Every rank runs `check_nodes` at the same time; all get the same report.

_LARGEST_OFFSET = 2.0
"""Seconds between clocks above which logs and times of files mislead."""
_SLOW_SIGHT = 5.0
"""Seconds until a new file is seen on all nodes, above which checkpoints slow down a run."""
_ROUNDS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesReport:
    """Result of `check_nodes`."""

    ranks: Sequence[Mapping[str, Any]]
    """Measurements of each rank, in rank order."""
    latency_us: float
    """Median time of an all-reduce of one number."""
    bandwidth_gb: float
    """Bus bandwidth of an all-reduce of `megabytes` in GB/s: bytes that each rank sends, per
    second.
    """
    megabytes: int
    problems: Sequence[str]
    """Reasons why a run would fail, or not resume."""

    def __str__(self) -> str:
        """Return the report as a table with one line per node, and the problems."""
        rows = [("node", "host", "ranks", "device", "clock s", "storage s", "joined s")]
        for node in sorted({rank["node"] for rank in self.ranks}):
            of_node = [rank for rank in self.ranks if rank["node"] == node]
            seen = [rank["storage"] for rank in of_node if isinstance(rank["storage"], float)]
            clock = max((rank["clock"] for rank in of_node), key=abs)
            storage = f"{max(seen):.2f}" if seen else "-"
            cells = (
                str(node),
                of_node[0]["host"],
                str(len(of_node)),
                of_node[0]["device"],
                f"{clock:+.3f}",
            )
            rows.append((*cells, storage, f"{max(rank['joined'] for rank in of_node):.1f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        versions = ", ".join(
            f"{name} {version}" for name, version in self.ranks[0]["versions"].items()
        )
        lines.append(f"rank 0 has {versions}")
        size = f"{len(self.ranks)} ranks: {self.latency_us:.0f} µs for one number"
        lines.append(
            f"all-reduce over {size}, {self.bandwidth_gb:.2f} GB/s for {self.megabytes} MB"
        )
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems or ())])


def check_nodes(
    ranks: RankInfo, joined: float, storage: Path | None, megabytes: int = 64
) -> NodesReport:
    """Run all checks. Collective call.

    Args:
        ranks: several ranks.
        joined: seconds that this rank took to join them.
        storage: folder that all nodes mount, for shards and checkpoints; None for no check.
        megabytes: size of the all-reduce whose bandwidth is measured.

    Raises ConfigError on a single rank.
    """
    if ranks.size == 1:
        message = "expected several ranks, got one; start the command with torchrun on every node"
        raise ConfigError(message, "missing", field="ranks")
    latency, transfer = (_all_reduce_seconds(ranks, count) for count in (1, megabytes * 2**20 // 4))
    own = {
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(ranks.device)
        if ranks.device.type == "cuda"
        else "cpu",
        "versions": _versions(),
        "clock": _clock_offset(ranks),
        "joined": joined,
        "storage": None if storage is None else _check_storage(ranks, storage),
    }
    reports = ranks.exchange(own)
    return NodesReport(
        ranks=reports,
        latency_us=1e6 * latency,
        bandwidth_gb=2 * (ranks.size - 1) / ranks.size * megabytes * 2**20 / transfer / 1e9,
        megabytes=megabytes,
        problems=ranks.from_main([*_disagreements(reports), *_lost_nodes(reports)]),
    )


def _all_reduce_seconds(ranks: RankInfo, numbers: int) -> float:
    """Return the median time of an all-reduce of float32 numbers on the device."""
    values = torch.ones(numbers, device=ranks.device)
    seconds = []
    for _ in range(_ROUNDS if numbers == 1 else 5):
        _synchronize(ranks)
        started = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(ranks)
        seconds.append(time.perf_counter() - started)
        values.fill_(1)
    return float(ranks.from_main(statistics.median(seconds[1:])))


def _synchronize(ranks: RankInfo) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _clock_offset(ranks: RankInfo) -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's, within the time of a
    barrier.
    """
    offsets = []
    for _ in range(5):
        ranks.any(False)
        times = ranks.exchange(time.time())
        offsets.append(times[ranks.rank] - times[0])
    return statistics.median(offsets)


def _versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "medvl": medvl.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "nccl": nccl,
    }


def _check_storage(ranks: RankInfo, storage: Path) -> float | str:
    """Return the seconds until a file of rank 0 was visible, or the problem of the folder.
    Collective call.
    """
    name = ranks.from_main(f".medvl-doctor-{uuid.uuid4().hex}")
    folder = storage / name
    own: float | str = 0.0
    with _removed(folder, ranks):
        made = ranks.from_main(_problem(lambda: _make(folder)) if ranks.is_main else None)
        if made is not None:
            return f"rank 0 cannot write: {made}"
        started = time.perf_counter()
        problem = _problem(lambda: wait_for(folder / "0", seconds=30))
        own = (
            time.perf_counter() - started
            if problem is None
            else f"the folder of rank 0 is not seen: {problem}"
        )
        if problem is None and ranks.rank:
            problem = _problem(lambda: _write(folder / str(ranks.rank)))
            own = own if problem is None else f"cannot write: {problem}"
        seen = ranks.exchange(own)  # all files are written now
        if ranks.is_main:
            for rank in (
                rank for rank, result in enumerate(seen) if rank and isinstance(result, float)
            ):
                problem = _problem(functools.partial(wait_for, folder / str(rank), seconds=30))
                own = own if problem is None else f"rank 0 does not see the file of rank {rank}"
        return _check_lock(ranks, folder, own)


def _check_lock(ranks: RankInfo, folder: Path, own: float | str) -> float | str:
    """Return `own`, or the problem that rank 0's lock on the folder does not exclude this rank."""
    with contextlib.ExitStack() as held:
        failed = ranks.from_main(
            _problem(lambda: held.enter_context(RunLock(folder))) if ranks.is_main else None
        )
        refused = ranks.is_main or failed is not None or _problem(lambda: _lock(folder)) is not None
        ranks.any(False)  # rank 0 holds the lock until all have tried
    if isinstance(own, str):
        return own
    if failed is not None:
        return f"cannot lock: {failed}"
    return own if refused else "locks do not exclude other nodes; two runs could write one folder"


def _lock(folder: Path) -> None:
    with RunLock(folder):
        pass


def _make(folder: Path) -> None:
    folder.mkdir()
    _write(folder / "0")


def _write(path: Path) -> None:
    with path.open("w") as file:
        file.write("medvl doctor nodes\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _removed(folder: Path, ranks: RankInfo) -> Iterator[None]:
    """Remove the folder on rank 0 at the end, when all ranks are done with it."""
    yield
    ranks.any(False)
    if ranks.is_main and folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _problem(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except (OSError, MedvlError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _disagreements(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield differences between ranks, and failures of some of them."""
    for rank, other in enumerate(reports):
        where = f"rank {rank} on {other['host']}"
        for name, version in reports[0]["versions"].items():
            if other["versions"][name] != version:
                here = other["versions"][name]
                yield (
                    f"{where} has {name} {here}, rank 0 has {version}; install the same on "
                    f"all nodes"
                )
        if abs(other["clock"]) > _LARGEST_OFFSET:
            yield (
                f"{where} has a clock {other['clock']:+.1f} s off rank 0's; synchronise the "
                f"clocks (NTP)"
            )
        if isinstance(other["storage"], str):
            yield f"{where}: storage: {other['storage']}"
        elif other["storage"] is not None and other["storage"] > _SLOW_SIGHT:
            yield (
                f"{where} sees a new file after {other['storage']:.1f} s; shorten the "
                f"attribute cache of the mount"
            )


def _lost_nodes(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    several = len({rank["node"] for rank in reports}) > 1
    if several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield (
            "torchrun cannot replace a lost node; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
            "all nodes"
        )


# Check of remote shards from this machine: access, latency, throughput, and the cache.

_SAMPLES = 64
_WARM_UP = 2
_MEGABYTE = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemoteShards:
    """Measurements of a remote folder of shards. Rates are of one process."""

    address: str
    samples: int
    shards: int
    bytes: int
    """Size of all tars."""
    open_seconds: float
    """Manifest, sizes and indexes."""
    latency_ms: float
    """Median time of a request for one sample."""
    samples_per_second: float
    """Samples read at random, not cached, with the threads of a loader's worker."""
    megabytes_per_second: float
    """One shard fetched whole, as for the cache."""
    sends_ranges: bool
    """Whether the server sends parts of files."""
    cache_folder: str
    cache_limit: int
    cache_used: int


def check_remote_shards(address: str | Location) -> RemoteShards:
    """Measure remote shards: a few dozen requests, and one shard fetched whole.

    Raises ConfigError for a local folder, ShardError where a file is missing or damaged,
    StorageError where the store cannot be reached or refuses access.
    """
    target = locate(address)
    if not isinstance(target, RemotePath):
        raise ConfigError(
            f"expected the address of remote shards, got {target}", "wrong_type", field="address"
        )
    cache = Cache.from_environment()
    started = time.perf_counter()
    source = ShardSource(target, cache=Cache(cache.folder, 0))
    open_seconds = time.perf_counter() - started
    if not len(source):
        raise ConfigError(f"{target} has no samples; check another split", "empty", field="address")
    positions = np.random.default_rng(0).permutation(len(source))[: _SAMPLES + _WARM_UP].tolist()
    times = [
        _seconds(source, position)
        for position in positions[: max(_WARM_UP + 1, len(positions) // 4)]
    ]
    rest = positions[len(times) :] or positions
    fresh = ShardSource(target, cache=Cache(cache.folder, 0))
    started = time.perf_counter()
    list(map_threads(fresh.sample, rest))
    rate = len(rest) / (time.perf_counter() - started)
    shard = source.manifest.shards[0]
    started = time.perf_counter()
    read = sum(map(len, stream(f"{target}/{shard.name}.tar", shard.bytes)))
    seconds = time.perf_counter() - started
    return RemoteShards(
        address=str(target),
        samples=len(source),
        shards=len(source.manifest.shards),
        bytes=sum(entry.bytes for entry in source.manifest.shards),
        open_seconds=open_seconds,
        latency_ms=1000 * statistics.median(times[_WARM_UP:] or times),
        samples_per_second=rate,
        megabytes_per_second=read / seconds / _MEGABYTE,
        sends_ranges=sends_ranges(str(target)),
        cache_folder=str(cache.folder),
        cache_limit=cache.limit,
        cache_used=cache.use().bytes,
    )


def _seconds(source: ShardSource, position: int) -> float:
    started = time.perf_counter()
    source.sample(position)
    return time.perf_counter() - started


def describe_remote_shards(remote: RemoteShards) -> str:
    """Return the measurements as a table, with advice at its end."""
    rows = [
        (
            "shards",
            f"{remote.address}: {remote.samples} samples in {remote.shards} shards, "
            f"{remote.bytes / 1e9:.2f} GB",
        ),
        ("opened in", f"{remote.open_seconds:.2f} s"),
        ("one sample", f"{remote.latency_ms:.1f} ms (median)"),
        (
            "at random",
            f"{remote.samples_per_second:.0f} samples/s with {THREADS} threads, not cached",
        ),
        ("one shard", f"{remote.megabytes_per_second:.1f} MB/s"),
        (
            "cache",
            f"{remote.cache_folder}: {remote.cache_used / 1e9:.2f} of "
            f"{remote.cache_limit / 1e9:.2f} GB used",
        ),
    ]
    lines = [f"{name:24}{value}" for name, value in rows]
    return "\n".join([*lines, *(f"{'':24}{line}" for line in _advice(remote))])


def _advice(remote: RemoteShards) -> list[str]:
    advice = []
    if not remote.sends_ranges:
        advice.append(
            "the server sends whole files instead of parts of them: keep the cache larger than "
            "the shards"
        )
    if remote.cache_limit < remote.bytes:
        missing = (
            f"{remote.bytes / 1e9:.2f} GB of shards, {remote.cache_limit / 1e9:.2f} GB of cache"
        )
        advice.append(
            f"{missing}: the rest is requested in every epoch; raise MEDVL_CACHE_SIZE, or use a "
            f"larger disk"
        )
    elif remote.samples_per_second:
        seconds = remote.bytes / _MEGABYTE / max(remote.megabytes_per_second, 1e-9)
        duration = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        advice.append(
            f"the cache has room for all shards: they are fetched once, in about {duration}"
        )
    return advice
