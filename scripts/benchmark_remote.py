"""Benchmark of remote shards against local ones, in samples per second of one process: cold and warm cache.

    python scripts/benchmark_remote.py                                 # moto's server on this machine
    python scripts/benchmark_remote.py --latency-ms 30 --images 600    # with the latency of a store far away
    python scripts/benchmark_remote.py --address s3://bucket/train --shards shards/train

Samples are read in the loader's random order, in batches, JSON and encoded image of each; decoding is left out, as it
is the same for both. `ranges`: no cache, each sample is a request. `cold`: an empty cache, which fills meanwhile.
`warm`: all shards are in it. The server shares the cores of this machine, so that its figures are lower bounds.
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from unittest import mock

import numpy as np

from medvl import phantom
from medvl.data import Cache, Deidentifier, ShardOptions, ShardRun, ShardSource, upload_shards, write_shards
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.storage import store
from medvl.data.storage.store import map_threads


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="remote shards; default: moto's server on this machine, with the phantom")
    parser.add_argument("--shards", type=Path, help="the same shards on a local disk")
    parser.add_argument("--images", type=int, default=400, help="samples of an epoch")
    parser.add_argument("--patients", type=int, default=160, help="patients of the phantom")
    parser.add_argument("--per-shard", type=int, default=100, help="samples of a shard of the phantom")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to every request")
    options = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        local_store = stack.enter_context(_store(options.address is None))
        shards = options.shards or phantom_shards(home, options.patients, options.per_shard)
        if local_store is not None:
            upload_shards(shards, local_store)
        address = options.address or str(local_store)
        stack.enter_context(_latency(options.latency_ms / 1000))
        size = sum(shard.bytes for shard in ShardSource(shards).manifest.shards)
        print(f"{len(ShardSource(shards))} samples, {size / 1e6:.1f} MB, {options.latency_ms:g} ms of latency added")
        caches = iter(home / f"cache-{number}" for number in range(1000))
        warm = Cache(next(caches), 10**12)
        read(ShardSource(address, cache=warm), options.images, options.batch)
        ways: dict[str, Callable[[], ShardSource]] = {
            "local": lambda: ShardSource(shards),
            "ranges": lambda: ShardSource(address, cache=Cache(next(caches), 0)),
            "cold": lambda: ShardSource(address, cache=Cache(next(caches), 10**12)),
            "warm": lambda: ShardSource(address, cache=warm),
        }
        print(f"{'':8}{'samples/s':>12}{'of local':>10}{'first batch':>14}")
        base = 0.0
        for name, opened in ways.items():
            measured = [read(opened(), options.images, options.batch) for _ in range(options.repeats)]
            rate, first = (statistics.median(column) for column in zip(*measured, strict=True))
            base = base or rate
            print(f"{name:8}{rate:12.0f}{rate / base:10.2f}{first:12.3f} s")


def read(source: ShardSource, images: int, batch: int) -> tuple[float, float]:
    """Return samples per second over an epoch in random order, and the seconds of the first batch."""
    order = np.random.default_rng(0).permutation(len(source))[:images].tolist()
    started, first = time.perf_counter(), 0.0
    for place in range(0, len(order), batch):
        positions = order[place : place + batch]
        if source.is_remote:
            list(map_threads(source.sample, positions))
        for position in positions:
            source.sample(position)
            source.image_bytes(position)
        first = first or time.perf_counter() - started
    return len(order) / (time.perf_counter() - started), first


def phantom_shards(home: Path, patients: int, per_shard: int) -> Path:
    """Return a folder of shards of the phantom at 512 pixels."""
    phantom.write_mimic_cxr_jpg(home / "phantom", patients=patients, size=512)
    deid = Deidentifier(bytes(16))
    plan = mimic_cxr.plan(home / "phantom", deid, split="train")
    write_shards(plan, deid, ShardRun(out=home / "shards"), ShardOptions(samples_per_shard=per_shard))
    return home / "shards" / "train"


@contextmanager
def _latency(seconds: float) -> Iterator[None]:
    """Add a latency to every request for a file or a part of one."""
    plain = store.read

    def delayed(url: str, offset: int | None = None, size: int | None = None) -> bytes:
        time.sleep(seconds)
        return plain(url, offset, size)

    with mock.patch.object(store, "read", delayed if seconds else plain):
        yield


def _serve(port: "Synchronized[int]") -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port.value = server.get_host_and_port()[1]
    time.sleep(10**6)


@contextmanager
def _store(is_needed: bool) -> Iterator[str | None]:
    """Run an object store in another process; yields the address of a folder in it."""
    if not is_needed:
        yield None
        return
    import fsspec

    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    server = context.Process(target=_serve, args=(port,), daemon=True)
    server.start()
    while not port.value:
        time.sleep(0.05)
    keys = {"aws_access_key_id": "access", "aws_secret_access_key": "secret", "region_name": "eu-west-1"}
    endpoint = f"http://127.0.0.1:{port.value}"
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint, "client_kwargs": keys}
    fsspec.filesystem("s3").mkdir("benchmark")
    try:
        yield "s3://benchmark/train"
    finally:
        server.terminate()


if __name__ == "__main__":
    os.environ.setdefault("MEDVL_REMOTE_RETRIES", "2")
    main()
