"""Conversion of DICOM files to shards beside bare decoding, the memory of a plan, and engines.

Bare decoding is `pydicom.dcmread(path).pixel_array`. Conversion adds the window, the resize, the
JPEG encoding, the report, the hashes and the tar. Rates of decoding and conversion are of CPU
seconds of one process, without the time of disk reads; uncompressed files need no decoding beyond a
copy. Rates of engines are wall-clock, with the start of their processes.
"""

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pydicom
from measure import plan_memory
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report

from medvl import phantom
from medvl.common.untrusted import ANYWHERE
from medvl.data import (
    Deidentifier,
    Plan,
    Record,
    RowCounts,
    ShardOptions,
    ShardRun,
    ShardTask,
    build_shard,
    write_shards,
)
from medvl.data.corpora.reports import mimic_cxr
from medvl.errors import ShardError

OPTIONS = ShardOptions(keep_textless=True)
UNCOMPRESSED = "Little Endian"
"""Part of the names of transfer syntaxes without compression."""
KEY = bytes(32)


def measure_dicom(bench: Bench) -> Report:
    """Measure decoding and conversion of phantom files of 2,544 pixels by transfer syntax, the best
    of two; the totals are sums over all syntaxes.
    """
    images, repeats = bench.size((360, 2), (2, 1))
    figures: dict[str, float | None] = {}
    sums = {"bare": 0.0, "converted": 0.0}
    records = phantom_records(bench.folder / "dicom", images, bench.size(2544, 64))
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        header = pydicom.dcmread(str(record.sample.image), stop_before_pixels=True)
        groups[header.file_meta.TransferSyntaxUID.name].append(record)
    for name, group in sorted(groups.items()):
        task = ShardTask("benchmark", "train", bench.folder, tuple(group), OPTIONS, ANYWHERE)
        bare = min(bare_seconds(group) for _ in range(repeats))
        converted = min(build_seconds(task) for _ in range(repeats))
        sums["bare"] += bare
        sums["converted"] += converted
        figures[f"{name}, times"] = bare / converted
    plain = [share for name, share in figures.items() if UNCOMPRESSED in name and share]
    if plain:
        figures |= {"uncompressed, least times": min(plain)}
        figures |= {"uncompressed, largest times": max(plain)}
    return report([], {"all, times": sums["bare"] / sums["converted"], **figures})


def phantom_records(folder: Path, images: int, size: int) -> Sequence[Record]:
    """Return the records of so many DICOM files of a phantom MIMIC-CXR."""
    phantom.write_mimic_cxr(folder, patients=max(1, images // 3), size=size)
    return mimic_cxr.MimicCXR(root=folder).plan(Deidentifier(KEY)).records[:images]


def bare_seconds(records: Sequence[Record]) -> float:
    """Return the CPU seconds of bare decoding."""
    started = time.process_time()
    for record in records:
        _ = pydicom.dcmread(str(record.sample.image)).pixel_array
    return time.process_time() - started


def build_seconds(task: ShardTask) -> float:
    """Return the CPU seconds of building a shard."""
    started = time.process_time()
    build_shard(task, lambda: None)
    return time.process_time() - started


def measure_plan(bench: Bench) -> Report:
    """Measure the peak memory of a process that plans and converts 100,000 rows."""
    folder, rows = bench.folder / "plan", bench.size(100_000, 20)
    if bench.dry_run:
        return report([], plan_memory.measure(folder, rows))
    command = [sys.executable, plan_memory.__file__, str(folder), str(rows)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return report([], json.loads(printed))


def measure_engines(bench: Bench) -> Report:
    """Measure conversions with two workers of which one is killed, by local processes and by Ray.

    A run that a killed worker ends is resumed. Raises ValueError where runs write different bytes.
    """
    images = bench.size(240, 2)
    records = phantom_records(bench.folder / "mimic-cxr", images, bench.size(2544, 64))
    plan = Plan("mimic-cxr", records, (), RowCounts(read=len(records), kept=len(records)))
    options = ShardOptions(keep_textless=True, samples_per_shard=max(1, images // 24))
    workers = bench.size(2, 1)
    rates: dict[str, float | None] = {}
    bytes_of: dict[str, str] = {}
    notes = []
    for engine in ("local", "ray"):
        if engine == "ray" and (bench.dry_run or importlib.util.find_spec("ray") is None):
            notes.append("ray is not installed, or this is a dry run: not measured")
            continue
        run = ShardRun(out=bench.folder / f"shards-{engine}", workers=workers, engine=engine)
        started = time.perf_counter()
        convert(plan, run, options, kill=workers > 1)
        rates[f"{engine}, files/s"] = len(records) / (time.perf_counter() - started)
        bytes_of[engine] = digest(run.out)
    if len(set(bytes_of.values())) > 1:
        raise ValueError(f"expected equal bytes of all engines, got {bytes_of}")
    return report([], rates, *notes)


def convert(plan: Plan, run: ShardRun, options: ShardOptions, kill: bool) -> None:
    """Convert, and kill one worker meanwhile if `kill`. A broken local run is resumed."""
    if kill:
        threading.Thread(target=kill_a_worker, args=(run.out,), daemon=True).start()
    deid = Deidentifier(KEY)
    try:
        write_shards(plan, deid, run, options)
    except ShardError:
        write_shards(plan, deid, run, options)


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


LINES = (
    Line(
        name="dicom",
        device="cpu",
        measures="DICOM files of 2,544 px to shards, beside bare decoding",
        unit="times",
        rows=(
            TableRow(
                title="DICOM to shards, mixed compressions",
                target="0.9 times",
                peer="bare decoding",
                ours="{all, times:.2f} times",
            ),
            TableRow(
                title="DICOM to shards, uncompressed",
                target="0.9 times",
                peer="bare decoding, a copy",
                ours="{uncompressed, least times:.2f} to {uncompressed, largest times:.2f} times",
            ),
        ),
        seconds=300,
        function=measure_dicom,
    ),
    Line(
        name="plan",
        device="cpu",
        measures="memory of planning and converting 100,000 rows",
        unit="MB",
        rows=(
            TableRow(
                title="planning a conversion of 100,000 rows",
                ours="{MB planned:.0f} MB, {MB converted:.0f} MB at its peak",
            ),
        ),
        seconds=300,
        function=measure_plan,
    ),
    Line(
        name="engines",
        device="cpu",
        measures="conversion by two workers of which one is killed, beside Ray",
        unit="files/s",
        rows=(
            TableRow(
                title="conversion, two workers",
                peer="`--engine ray`: {ray, files/s:.1f} files/s",
                ours="{local, files/s:.1f} files/s",
            ),
        ),
        seconds=120,
        function=measure_engines,
    ),
)
