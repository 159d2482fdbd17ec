"""Benchmark of remote shards against local ones, in samples per second of one process: cold and
warm cache.

    python scripts/benchmark_remote.py                               # a web server on this machine
    python scripts/benchmark_remote.py --latency-ms 30 --images 600  # with the latency of a store far away
    python scripts/benchmark_remote.py --address s3://bucket/train --shards shards/train

Samples are read in the loader's random order, in batches, JSON and encoded image of each; decoding
is left out, as it is the same for both. `ranges`: no cache, each sample is a request. `cold`: an
empty cache, which fills meanwhile. `warm`: all shards are in it. The server shares the cores of
this machine, so that its figures are lower bounds.
"""

import argparse
import functools
import http.server
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np

from medvl import phantom
from medvl.data import Cache, Deidentifier, ShardOptions, ShardRun, ShardSource, write_shards
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.storage.store import map_threads


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address", help="remote shards; default: a web server on this machine, with the phantom"
    )
    parser.add_argument("--shards", type=Path, help="the same shards on a local disk")
    parser.add_argument("--images", type=int, default=400, help="samples of an epoch")
    parser.add_argument("--patients", type=int, default=160, help="patients of the phantom")
    parser.add_argument(
        "--per-shard", type=int, default=100, help="samples of a shard of the phantom"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="added by the web server to every request"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shards = options.shards or phantom_shards(home, options.patients, options.per_shard)
        address = options.address or stack.enter_context(_server(shards, options.latency_ms / 1000))
        size = sum(shard.bytes for shard in ShardSource(shards).manifest.shards)
        print(
            f"{len(ShardSource(shards))} samples, {size / 1e6:.1f} MB, {options.latency_ms:g} "
            f"ms of latency added"
        )
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
            measured = [
                read(opened(), options.images, options.batch) for _ in range(options.repeats)
            ]
            rate, first = (statistics.median(column) for column in zip(*measured, strict=True))
            base = base or rate
            print(f"{name:8}{rate:12.0f}{rate / base:10.2f}{first:12.3f} s")


def read(source: ShardSource, images: int, batch: int) -> tuple[float, float]:
    """Return samples per second over an epoch in random order, and the seconds of the first
    batch.
    """
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
    plan = mimic_cxr.MimicCXR(root=home / "phantom", split="train").plan(deid)
    write_shards(
        plan, deid, ShardRun(out=home / "shards"), ShardOptions(samples_per_shard=per_shard)
    )
    return home / "shards" / "train"


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server that sends parts of files, after a pause."""

    protocol_version = "HTTP/1.1"
    latency = 0.0

    def do_GET(self) -> None:
        """Send a file, or the part that is asked for."""
        time.sleep(self.latency)
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", ""))
        with path.open("rb") as file:
            file.seek(int(wanted[1]) if wanted else 0)
            data = file.read(int(wanted[2]) - int(wanted[1]) + 1) if wanted else file.read()
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def _serve(folder: str, latency: float, port: "Synchronized[int]") -> None:
    _Ranges.latency = latency
    handler = functools.partial(_Ranges, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        port.value = server.server_port
        server.serve_forever()


@contextmanager
def _server(folder: Path, latency: float) -> Iterator[str]:
    """Serve a folder from another process. Yields its address."""
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    server = context.Process(target=_serve, args=(str(folder), latency, port), daemon=True)
    server.start()
    try:
        while not port.value and server.is_alive():
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.value}"
    finally:
        server.terminate()


if __name__ == "__main__":
    os.environ.setdefault("MEDVL_REMOTE_RETRIES", "2")
    main()
