"""Remote shards beside local ones, in samples per second of one process: cold and warm cache.

Samples are read in the loader's random order, in batches, JSON and encoded image of each; decoding
is left out, as it is the same for both. `ranges`: no cache, each sample is a request. `cold`: an
empty cache, which fills meanwhile. `warm`: all shards are in it. The web server shares the cores of
this machine, so that its figures are lower bounds.
"""

import functools
import http.server
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report

from medvl import phantom
from medvl.data import Cache, Deidentifier, ShardOptions, ShardRun, ShardSource, write_shards
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.storage.store import map_threads


def measure_remote(bench: Bench) -> Report:
    """Measure epochs of 400 samples from a local folder and from a web server on this machine."""
    patients, per_shard, images, batch, repeats = bench.size(
        (160, 100, 400, 32, 3), (4, 4, 8, 4, 1)
    )
    home = bench.folder / "remote"
    shards = phantom_shards(home, patients, per_shard)
    caches = (home / f"cache-{number}" for number in range(1000))
    figures = {}
    with _server(shards) as address:
        warm = Cache(next(caches), 10**12)
        read(ShardSource(address, cache=warm), images, batch)
        ways: dict[str, Callable[[], ShardSource]] = {
            "local": lambda: ShardSource(shards),
            "ranges": lambda: ShardSource(address, cache=Cache(next(caches), 0)),
            "cold": lambda: ShardSource(address, cache=Cache(next(caches), 10**12)),
            "warm": lambda: ShardSource(address, cache=warm),
        }
        for name, opened in ways.items():
            rates = [read(opened(), images, batch) for _ in range(repeats)]
            figures[f"{name}, samples/s"] = statistics.median(rates)
    return report([], figures)


def read(source: ShardSource, images: int, batch: int) -> float:
    """Return samples per second over an epoch in random order."""
    order = np.random.default_rng(0).permutation(len(source))[:images].tolist()
    started = time.perf_counter()
    for place in range(0, len(order), batch):
        positions = order[place : place + batch]
        if source.is_remote:
            list(map_threads(source.sample, positions))
        for position in positions:
            source.sample(position)
            source.image_bytes(position)
    return len(order) / (time.perf_counter() - started)


def phantom_shards(home: Path, patients: int, per_shard: int) -> Path:
    """Return a folder of shards of the phantom at 512 pixels."""
    phantom.write_mimic_cxr_jpg(home / "phantom", patients=patients, size=512, workers=1)
    deid = Deidentifier(bytes(16))
    plan = mimic_cxr.MimicCXR(root=home / "phantom", split="train").plan(deid)
    write_shards(
        plan,
        deid,
        ShardRun(out=home / "shards", workers=1),
        ShardOptions(samples_per_shard=per_shard),
    )
    return home / "shards" / "train"


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server that sends parts of files."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send a file, or the part that is asked for."""
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


def _serve(folder: str, port: "Synchronized[int]") -> None:
    handler = functools.partial(_Ranges, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        port.value = server.server_port
        server.serve_forever()


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Serve a folder from another process. Yields its address."""
    context = multiprocessing.get_context("fork")
    port = context.Value("i", 0)
    server = context.Process(target=_serve, args=(str(folder), port), daemon=True)
    server.start()
    try:
        while not port.value and server.is_alive():
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.value}"
    finally:
        server.terminate()


LINES = (
    Line(
        name="remote",
        device="cpu",
        measures="remote shards, 60 KB a sample, beside local ones",
        unit="samples/s",
        rows=(
            TableRow(
                title="remote shards, 60 KB a sample",
                peer="local: {local, samples/s:,.0f} samples/s",
                ours="cold cache {cold, samples/s:,.0f}, warm {warm, samples/s:,.0f}",
            ),
        ),
        seconds=60,
        function=measure_remote,
    ),
)
