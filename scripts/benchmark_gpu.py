"""Benchmark of one GPU: steps, losses, loader and decoding, beside open_clip's step and stock
forms, and its tests.

    python scripts/benchmark_gpu.py --list               # the lines with their targets
    python scripts/benchmark_gpu.py --out gpu            # measure; the tables are in gpu/table.md
    python scripts/benchmark_gpu.py --out gpu --tests    # the tests marked gpu
    python scripts/benchmark_gpu.py --out dry --dry-run  # tiny sizes on a CPU: does every line work?

A call ends within `--minutes`. Every finished line is written to results.json of the folder at
once, and the same command measures only the lines that are missing or failed. A line that does not
fit into the remaining time is skipped, and one that fails leaves the others as they are. Outcomes
of the tests are kept in tests.jsonl likewise, and the same command runs those that have not passed.
Compiled kernels and phantom images stay in the folder `--kept`, where later calls find them. Each
contender of a line has its own time by CUDA's events and by the host's clock, peak memory, MFU
against a large bf16 product that is measured first, and a profile. Nothing is read from the
network. On a machine without a package index, install the wheels of `scripts/gpu_wheels.txt` first.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_lines import gpu_tests
from gpu_lines.bench import Bench, OutOfTime, time_limit
from gpu_lines.line import Line, SkipLine
from gpu_lines.records import ROOT, Record, context_of, page, read_records, write_records
from gpu_lines.registry import LINES, select, targets
from gpu_lines.timing import ceiling_tflops, describe, release

from medvl.train.parallel.distributed import (
    join,
    machine_settings,
)  # internal: the settings of a training run

SIDE, TINY_SIDE = 8192, 64
"""Side of the matrices whose product gives the ceiling of MFU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if a line failed."""
    options = _options().parse_args(arguments)
    if options.list:
        print(targets())
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tests:
        return gpu_tests.run(ROOT, options.out, 60 * options.minutes)
    try:
        lines = select(options.lines)
        records = read_records(options.out, LINES, options.dry_run)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    notes = measure(lines, records, options)
    text = page([line for line in LINES if line in lines or line.name in records], records, notes)
    if outcomes := gpu_tests.read(options.out / gpu_tests.OUTCOMES):
        text += f"\n\n{gpu_tests.summarize(outcomes)}"
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(record.error is not None for record in records.values()))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu"),
        help="folder of results.json, table.md, tests.jsonl",
    )
    parser.add_argument(
        "--kept",
        type=Path,
        default=ROOT / ".cache/gpu",
        help="folder of compiled kernels and images",
    )
    parser.add_argument(
        "--lines", nargs="+", default=[], metavar="NAME", help="names of lines, with wildcards"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of the call, without its imports"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, without compilation"
    )
    parser.add_argument("--list", action="store_true", help="print the lines with their targets")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu instead")
    return parser


def measure(
    lines: Sequence[Line], records: dict[str, Record], options: argparse.Namespace
) -> dict[str, str]:
    """Measure the lines that have no result yet and add them to `records`; return why the others
    were left out.
    """
    end = time.monotonic() + 60 * options.minutes
    notes: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        join("cpu" if options.dry_run else "auto") as ranks,
        machine_settings(ranks, 1 if options.dry_run else None, False, "bf16"),
        torch.compiler.set_stance("force_eager" if options.dry_run else "default"),
    ):
        if ranks.device.type == "cpu" and not options.dry_run:
            raise SystemExit(
                "error: no GPU was found; --dry-run runs all lines at tiny sizes on the CPU"
            )
        folder = Path(name)
        kept = folder if options.dry_run else options.kept.absolute()
        kept.mkdir(parents=True, exist_ok=True)
        if not options.dry_run:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept / "inductor"))
        bench = Bench(ranks=ranks, dry_run=options.dry_run, folder=folder, kept=kept, end=end)
        bench.ceiling_tflops = ceiling_tflops(ranks.device, bench.size(SIDE, TINY_SIDE))
        context = context_of(ranks.device, bench.ceiling_tflops, options.dry_run)
        try:
            for line in lines:
                done = records.get(line.name)
                if done is not None and done.error is None:
                    continue
                needed, left = bench.size(line.seconds, 0.0), max(0.0, bench.remaining())
                if left <= needed:
                    notes[line.name] = (
                        f"not measured: about {needed:.0f} s needed, {left:.0f} s left"
                    )
                    continue
                record = measure_line(line, bench, context)
                if record is None:
                    notes[line.name] = "not measured: the time limit was reached within this line"
                    continue
                records[line.name] = record
                write_records(options.out, records)
                print(
                    f"{line.name}: {record.seconds:.0f} s{_problem(record)}",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            bench.close()
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
