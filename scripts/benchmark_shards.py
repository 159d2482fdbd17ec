"""Benchmark of conversion against bare decoding, by transfer syntax and by number of processes.

    python scripts/benchmark_shards.py  # 120 phantom files of 2544 x 2544 pixels
    python scripts/benchmark_shards.py --root MIMIC-CXR --images 500 --workers 1 8 16

Bare decoding is `pydicom.dcmread(path).pixel_array`. Conversion adds the window, the resize, the
JPEG encoding, the report, the hashes and the tar. The first table has CPU seconds of one process,
without the time of disk reads; uncompressed files need no decoding beyond a copy. The second table
has wall-clock time of complete conversions with the start of their processes, next to bare decoding
in as many processes, which shows how the machine itself scales.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import cv2
import pydicom

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

OPTIONS = ShardOptions(keep_textless=True)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder of MIMIC-CXR; default: a new phantom")
    parser.add_argument("--images", type=int, default=120)
    parser.add_argument("--size", type=int, default=2544, help="side of phantom images in pixels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of processes of complete conversions",
    )
    options = parser.parse_args()
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), options.root
        if root is None:
            root = folder / "mimic-cxr"
            phantom.write_mimic_cxr(root, patients=max(1, options.images // 3), size=options.size)
        deid = Deidentifier(bytes(32))
        records = mimic_cxr.MimicCXR(root=root).plan(deid).records[: options.images]
        by_syntax(records, folder, options.repeats)
        by_workers(records, deid, folder, options.workers)


def by_syntax(records: Sequence[Record], folder: Path, repeats: int) -> None:
    """Print files per CPU second, decoded and converted, for each transfer syntax and in total;
    best of the repeats.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        header = pydicom.dcmread(str(record.sample.image), stop_before_pixels=True)
        groups[header.file_meta.TransferSyntaxUID.name].append(record)
    print(f"{'CPU seconds of one process':46}{'files':>6}{'bare':>9}{'converted':>11}{'share':>7}")
    sums = [0.0, 0.0]
    for name, group in sorted(groups.items()):
        task = ShardTask("benchmark", "train", folder, tuple(group), OPTIONS, ANYWHERE)
        bare = min(bare_seconds(group) for _ in range(repeats))
        converted = min(build_seconds(task) for _ in range(repeats))
        sums = [sums[0] + bare, sums[1] + converted]
        print(line(name, len(group), bare, converted))
    print(line("all", len(records), *sums))


def line(name: str, files: int, bare: float, converted: float) -> str:
    """Return a row of the table: rates and their ratio."""
    return (
        f"{name:46}{files:6}{files / bare:8.1f}/s{files / converted:10.1f}/s{bare / converted:7.2f}"
    )


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


def by_workers(
    records: Sequence[Record], deid: Deidentifier, folder: Path, workers: Sequence[int]
) -> None:
    """Print wall-clock rates of complete conversions, and of bare decoding in as many processes."""
    print(f"{'wall clock':10}{'converted':>16}{'a process':>11}{'bare':>12}{'a process':>11}")
    shard_options = ShardOptions(
        keep_textless=True, samples_per_shard=max(1, len(records) // (4 * max(workers)))
    )
    first: tuple[float, float] | None = None
    for number in workers:
        run = ShardRun(out=folder / f"shards-{number}", workers=number)
        started = time.perf_counter()
        rows = RowCounts(read=len(records), kept=len(records))
        write_shards(Plan("mimic-cxr", records, (), rows), deid, run, shard_options)
        converted = len(records) / (time.perf_counter() - started)
        bare = bare_rate(records, number)
        first = first or (converted / number, bare / number)
        shares = converted / number / first[0], bare / number / first[1]
        print(
            f"{number:10} {converted:9.1f} files/s{shares[0]:11.2f}{bare:10.1f}/s{shares[1]:11.2f}"
        )


def bare_rate(records: Sequence[Record], processes: int) -> float:
    """Return files per second of processes that each decode all files, without their start."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(bare_seconds, [records[:1]] * processes, chunksize=1)
        started = time.perf_counter()
        pool.map(bare_seconds, [records] * processes, chunksize=1)
        return processes * len(records) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
