"""Benchmark of medvl: every line of PERFORMANCE.md beside its peer, in turns, on the same inputs.

    python scripts/benchmark.py --list                      # lines, targets and devices
    python scripts/benchmark.py info-nce-cpu dicom          # measure two lines, or wildcards
    python scripts/benchmark.py gloria --write              # and write their rows in PERFORMANCE.md
    python scripts/benchmark.py --minutes 9 --out gpu.json  # all lines that fit this machine
    python scripts/benchmark.py --dry-run                   # tiny sizes on a CPU, to see all work

Lines are functions of `scripts/lines`, one module per area. Lines of a CPU run on one thread; a GPU
line records time by CUDA's events and by the host's clock, peak memory, MFU against a large bf16
product, and a profile of each contender. Every finished line is written to `--out` at once, and the
same command measures only the lines that the file does not have. Compiled kernels, images and other
data stay in `--kept`, where later calls find them. Nothing is read from the network. On a machine
without a package index, install the wheels of `scripts/gpu_wheels.txt` first.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import cv2
import torch
from lines import read_lines, select
from measure.bench import Bench, OutOfTime, time_limit
from measure.line import Device, Line, SkipLine
from measure.page import with_rows
from measure.records import (
    ROOT,
    Record,
    context_of,
    details,
    provenance,
    read_records,
    summary,
    write_records,
)
from measure.timing import ceiling_tflops, describe, release

# internal: the settings of a training run
from medvl.train.parallel.distributed import join, machine_settings

PAGE = ROOT / "PERFORMANCE.md"
SIDE, TINY_SIDE = 8192, 64
"""Side of the matrices whose product gives the ceiling of MFU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if a line failed."""
    options = _options().parse_args(arguments)
    every = read_lines()
    try:
        lines = select(options.lines, every)
        records = {} if options.out is None else read_records(options.out, options.dry_run)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    if options.list:
        print(targets(lines if options.lines else list(every.values())))
        return 0
    if options.write and options.dry_run:
        raise SystemExit("error: figures of a dry run are no measurements; leave out --write")
    notes: dict[str, str] = {}
    for device in ("cpu", "gpu"):
        chosen = [line for line in lines if line.device == device]
        if chosen:
            notes |= measure(device, chosen, records, options)
    print(summary(lines, records, notes))
    if options.details:
        print("\n" + details(lines, records))
    print("\n" + provenance([records[line.name].context for line in lines if line.name in records]))
    if options.write:
        text = with_rows(PAGE.read_text(encoding="utf-8"), lines, records)
        PAGE.write_text(text, encoding="utf-8")
    return int(any(records[each.name].error for each in lines if each.name in records))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lines", nargs="*", metavar="LINE", help="names with wildcards; default: all lines"
    )
    parser.add_argument("--list", action="store_true", help="print the lines with their targets")
    parser.add_argument(
        "--write", action="store_true", help="replace the measured rows in PERFORMANCE.md"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="records; lines it has are not repeated"
    )
    parser.add_argument(
        "--details", action="store_true", help="also print figures, contenders and profiles"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, without compilation"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit without imports"
    )
    parser.add_argument(
        "--kept",
        type=Path,
        default=ROOT / ".cache/benchmark",
        help="folder of compiled kernels, images and data",
    )
    return parser


def targets(lines: Sequence[Line]) -> str:
    """Return the table of lines with their targets as Markdown."""
    head = "| line | device | what it measures | unit | target | seconds |"
    rows = []
    for line in lines:
        goals = "; ".join(row.target for row in line.rows if row.target) or "none"
        optional = ", only if named" if line.optional else ""
        rows.append(
            f"| `{line.name}` | {line.device} | {line.measures} | {line.unit} | {goals} | "
            f"{line.seconds:.0f}{optional} |"
        )
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def measure(
    device: Device, lines: Sequence[Line], records: dict[str, Record], options: argparse.Namespace
) -> dict[str, str]:
    """Measure the lines of a device that have no result yet and add them to `records`; return why
    the others were left out.
    """
    on_cpu = options.dry_run or device == "cpu"
    end = time.monotonic() + 60 * options.minutes
    if not on_cpu and not torch.cuda.is_available():
        if options.lines:
            raise SystemExit(
                "error: no GPU was found; --dry-run runs all lines at tiny sizes on the CPU"
            )
        return {line.name: "not measured: it needs a GPU" for line in lines}
    cv2.setNumThreads(0)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        join("cpu" if on_cpu else "auto") as ranks,
        machine_settings(ranks, 1 if on_cpu else None, False, "bf16"),
        torch.compiler.set_stance("force_eager" if options.dry_run else "default"),
    ):
        folder = Path(name)
        kept = folder if options.dry_run else options.kept.absolute()
        kept.mkdir(parents=True, exist_ok=True)
        if not options.dry_run:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept / "inductor"))
        bench = Bench(ranks=ranks, dry_run=options.dry_run, folder=folder, kept=kept, end=end)
        bench.ceiling_tflops = ceiling_tflops(ranks.device, TINY_SIDE if on_cpu else SIDE)
        context = context_of(ranks.device, bench.ceiling_tflops, options.dry_run)
        try:
            return _measure_all(lines, bench, context, records, options.out)
        finally:
            bench.close()


def _measure_all(
    lines: Sequence[Line],
    bench: Bench,
    context: dict[str, object],
    records: dict[str, Record],
    out: Path | None,
) -> dict[str, str]:
    """Measure lines one after another and return why some were left out."""
    notes: dict[str, str] = {}
    for line in lines:
        done = records.get(line.name)
        if done is not None and done.error is None:
            continue
        needed, left = bench.size(line.seconds, 0.0), max(0.0, bench.remaining())
        if left <= needed:
            notes[line.name] = f"not measured: about {needed:.0f} s needed, {left:.0f} s left"
            continue
        record = measure_line(line, bench, context)
        if record is None:
            notes[line.name] = "not measured: the time limit was reached within this line"
            continue
        records[line.name] = record
        if out is not None:
            write_records(out, records)
        message = f"{line.name}: {record.seconds:.0f} s{_problem(record)}"
        print(message, file=sys.stderr, flush=True)
    return notes


def measure_line(line: Line, bench: Bench, context: dict[str, object]) -> Record | None:
    """Return the record of a line, with its error if it failed; None where the time limit ended
    it.
    """
    started, record = time.monotonic(), Record(line=line.name, context=context, seconds=0.0)
    try:
        with time_limit(bench.remaining()):
            record.report = line.function(bench)
        errors = [row.error for row in record.report.rows]
        if errors and all(errors):
            record.error = f"all contenders failed, the first with {errors[0]}"
    except OutOfTime:
        return None
    except SkipLine as reason:
        record.unavailable = str(reason)
    except Exception as error:  # the other lines go on
        traceback.print_exc()
        record.error = describe(error)
    finally:
        # models of other lines would count towards the limit of compilations of a function
        torch.compiler.reset()
        release(bench.device)
    record.seconds = time.monotonic() - started
    return record


def _problem(record: Record) -> str:
    if record.report is not None:
        errors = [f"{row.contender}: {row.error}" for row in record.report.rows if row.error]
        return "".join(f"\n    {error}" for error in errors)
    return f": {record.error or record.unavailable}"


if __name__ == "__main__":
    sys.exit(main())
