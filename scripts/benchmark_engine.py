"""Benchmark of the engines of a conversion: local processes and Ray, a killed worker, many small
files, and a plan.

    python scripts/benchmark_engine.py                            # 96 phantom DICOM files of 2544 x 2544 pixels
    python scripts/benchmark_engine.py --images 0 --small 100000  # tiny PNG files: the cost of medvl and Ray alone
    python scripts/benchmark_engine.py --images 0 --plan 12.5 60  # files per second and core: DICOM, figures

Rates are wall-clock, with the start of the processes; "ready" is the time until the first shard was
finished. All runs must write the same bytes. The plan divides the files of MIMIC-CXR (377,110) and
of a corpus of 15 million figures by measured rates of one core; a share of the time is lost to
uneven ends, set by `--efficiency`.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl import phantom
from medvl.data import (
    Deidentifier,
    Plan,
    RowCounts,
    ShardOptions,
    ShardRun,
    encode_png,
    write_shards,
)
from medvl.data.corpora import table
from medvl.data.corpora.reports import mimic_cxr
from medvl.errors import ShardError

CORPORA = {"MIMIC-CXR, 377,110 DICOM": 377_110, "15,000,000 figures": 15_000_000}
MACHINES = ((1, 32), (8, 32), (32, 32))
"""(machines, cores of each)."""


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=96, help="phantom DICOM files; 0 leaves them out"
    )
    parser.add_argument("--size", type=int, default=2544, help="side of phantom images in pixels")
    parser.add_argument(
        "--small", type=int, default=0, help="number of tiny PNG files; 0 leaves them out"
    )
    parser.add_argument("--engines", nargs="+", default=["local", "ray"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--kill", action="store_true", help="kill one worker of each run with several"
    )
    parser.add_argument(
        "--plan",
        type=float,
        nargs=2,
        metavar="RATE",
        help="files per second and core of both corpora",
    )
    parser.add_argument(
        "--efficiency", type=float, default=0.85, help="share of the cores' time that the plan uses"
    )
    parser.add_argument(
        "--price", type=float, default=0.05, help="price of a core for an hour, for the plan"
    )
    options = parser.parse_args()
    deid = Deidentifier(bytes(32))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.images:
            root = folder / "mimic-cxr"
            phantom.write_mimic_cxr(root, patients=max(1, options.images // 3), size=options.size)
            records = mimic_cxr.MimicCXR(root=root).plan(deid).records[: options.images]
            rows = RowCounts(read=len(records), kept=len(records))
            plan = Plan("mimic-cxr", records, (), rows)
            measure(plan, options, folder / "dicom", samples_per_shard=max(1, options.images // 24))
        if options.small:
            plan = small_files(folder / "small", options.small, deid)
            measure(
                plan,
                options,
                folder / "small-shards",
                samples_per_shard=min(1000, max(1, options.small // 4)),
            )
    if options.plan:
        print_plan(options.plan, options.efficiency, options.price)


def small_files(folder: Path, count: int, deid: Deidentifier) -> Plan:
    """Write a table of tiny images and return its plan."""
    folder.mkdir()
    pixels = encode_png(np.zeros((16, 16), np.uint8))
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(count):
            image = folder / f"{number // 1000}" / f"{number}.png"
            image.parent.mkdir(exist_ok=True)
            image.write_bytes(pixels)
            row = {
                "image": str(image.relative_to(folder)),
                "patient": f"p{number}",
                "text": f"Image {number}.",
            }
            rows.write(json.dumps(row) + "\n")
    columns = table.TableColumns(
        image_column="image", patient_column="patient", text_column=("text",)
    )
    return table.Table(table=folder / "rows.jsonl", columns=columns).plan(deid)


def measure(plan: Plan, options: argparse.Namespace, folder: Path, samples_per_shard: int) -> None:
    """Print wall-clock rates of each engine and number of workers, and compare the bytes of all
    runs.
    """
    shard_options = ShardOptions(keep_textless=True, samples_per_shard=samples_per_shard)
    print(f"{len(plan.records)} files, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'engine':8}{'workers':>8}{'seconds':>10}{'files/s':>9}{'a worker':>10}{'driver MB':>11}  {'bytes':12}"
    )
    for engine in options.engines:
        for workers in options.workers:
            run = ShardRun(
                out=folder.with_name(f"{folder.name}-{engine}-{workers}"),
                workers=workers,
                engine=engine,
            )
            started = time.perf_counter()
            note = convert(plan, run, shard_options, kill=options.kill and workers > 1)
            seconds = time.perf_counter() - started
            rate = len(plan.records) / seconds
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            row = f"{engine:8}{workers:8}{seconds:10.1f}{rate:9.1f}{rate / workers:10.1f}{memory:11.0f}"
            print(f"{row}  {digest(run.out):12} {note}", flush=True)


def convert(plan: Plan, run: ShardRun, options: ShardOptions, kill: bool) -> str:
    """Convert, and kill one worker meanwhile if `kill`; returns what happened. A broken local
    run is resumed.
    """
    killer = threading.Thread(target=kill_a_worker, args=(run.out,), daemon=True)
    if kill:
        killer.start()
    deid = Deidentifier(bytes(32))
    try:
        write_shards(plan, deid, run, options)
    except ShardError:
        write_shards(plan, deid, run, options)
        return "a worker was killed, the command repeated"
    return "a worker was killed" if kill and not killer.is_alive() else ""


def kill_a_worker(out: Path) -> None:
    """Kill a process below this one that converts, once the first shard is finished."""
    while not list(out.glob("*/*.tar")):
        time.sleep(0.02)
    while True:
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            process = int(line.parent.name)
            try:
                command = line.read_bytes()
                converts = command.startswith(b"ray::_build_on_node") or b"spawn_main" in command
                if converts and os.getpid() in parents(process):
                    os.kill(process, signal.SIGKILL)
                    return
            except OSError:  # the process ended meanwhile
                continue
        time.sleep(0.02)


def parents(process: int) -> list[int]:
    """Return the ids of a process's parent, its parent's parent, and so on."""
    above = []
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        above.append(process)
    return above


def digest(out: Path) -> str:
    """Return a short hash of all shards, indexes and manifests of a folder."""
    total = hashlib.sha256()
    for path in sorted(out.rglob("*")):
        if path.is_file():
            total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:12]


def print_plan(rates: Sequence[float], efficiency: float, price: float) -> None:
    """Print hours and cost of whole corpora, from rates of one core."""
    print(
        f"{'corpus':28}{'files/s a core':>15}{'core hours':>12}{'machines':>14}{'hours':>8}{'cost':>8}"
    )
    for (name, files), rate in zip(CORPORA.items(), rates, strict=True):
        core_hours = files / rate / efficiency / 3600
        for machines, cores in MACHINES:
            hours, size = core_hours / (machines * cores), f"{machines} x {cores}"
            print(
                f"{name:28}{rate:15.1f}{core_hours:12.0f}{size:>14}{hours:8.2f}{core_hours * price:8.0f}"
            )


if __name__ == "__main__":
    main()
