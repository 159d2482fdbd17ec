"""Check of remote shards from this machine: access, latency, throughput, and the cache."""

import dataclasses
import statistics
import time

import numpy as np

from medvl.data.shards.source import ShardSource
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, RemotePath, locate
from medvl.data.storage.store import THREADS, map_threads, sends_ranges, stream
from medvl.errors import ConfigError

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


def describe_remote_shards(found: RemoteShards) -> str:
    """Return the measurements as a table, with advice at its end."""
    rows = [
        (
            "shards",
            f"{found.address}: {found.samples} samples in {found.shards} shards, "
            f"{found.bytes / 1e9:.2f} GB",
        ),
        ("opened in", f"{found.open_seconds:.2f} s"),
        ("one sample", f"{found.latency_ms:.1f} ms (median)"),
        (
            "at random",
            f"{found.samples_per_second:.0f} samples/s with {THREADS} threads, not cached",
        ),
        ("one shard", f"{found.megabytes_per_second:.1f} MB/s"),
        (
            "cache",
            f"{found.cache_folder}: {found.cache_used / 1e9:.2f} of "
            f"{found.cache_limit / 1e9:.2f} GB used",
        ),
    ]
    lines = [f"{name:24}{value}" for name, value in rows]
    return "\n".join([*lines, *(f"{'':24}{line}" for line in _advice(found))])


def _advice(found: RemoteShards) -> list[str]:
    advice = []
    if not found.sends_ranges:
        advice.append(
            "the server sends whole files instead of parts of them: keep the cache larger than "
            "the shards"
        )
    if found.cache_limit < found.bytes:
        missing = f"{found.bytes / 1e9:.2f} GB of shards, {found.cache_limit / 1e9:.2f} GB of cache"
        advice.append(
            f"{missing}: the rest is requested in every epoch; raise MEDVL_CACHE_SIZE, or use a "
            f"larger disk"
        )
    elif found.samples_per_second:
        seconds = found.bytes / _MEGABYTE / max(found.megabytes_per_second, 1e-9)
        duration = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        advice.append(
            f"the cache has room for all shards: they are fetched once, in about {duration}"
        )
    return advice
