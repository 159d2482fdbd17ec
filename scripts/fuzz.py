"""Fuzzing of readers: every mutated file must be read or raise one of medvl's errors.

    python scripts/fuzz.py  # 10,000 mutations per reader, some minutes on one core
    python scripts/fuzz.py dicom report --count 500
    python scripts/fuzz.py dicom --only 4711  # repeat one mutation, with its traceback

A mutation is determined by (seed, reader, number): bits flipped, bytes replaced, removed,
duplicated or moved, numbers set to extreme values, ends truncated. Each reader runs in a process of
its own, so that crashes are detected; more than ten seconds for a mutation is a failure. The exit
status is 1 after any failure.
"""

import argparse
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from fuzz_readers import READERS, Reader

from medvl.errors import MedvlError

SECONDS = 10
EXTREME_VALUES = (
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0",
    b"-1",
    b"1e999",
    b"\x80",
    b"../",
    b"{}",
)


@dataclasses.dataclass
class Tally:
    """Outcomes of the mutations."""

    read: int = 0
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)
    """Type of medvl's error -> count."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of failures."""
    slowest: float = 0.0


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the data with one to six changes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 7))):
        size = len(changed)
        if size == 0:
            break
        # Headers matter most, so the first bytes are changed more often.
        start = int(rng.integers(min(size, 2048) if rng.random() < 0.6 else size))
        length = int(rng.integers(1, 9))
        match int(rng.integers(8)):
            case 0 | 1:
                changed[start] ^= 1 << int(rng.integers(8))
            case 2:
                changed[start : start + length] = rng.bytes(length)
            case 3:
                extreme = EXTREME_VALUES[int(rng.integers(len(EXTREME_VALUES)))]
                changed[start : start + len(extreme)] = extreme
            case 4:
                del changed[start : start + int(rng.integers(1, 600))]
            case 5:
                piece = changed[start : start + int(rng.integers(1, 600))]
                other = int(rng.integers(size))
                changed[other:other] = piece
            case 6:
                changed[start:start] = rng.bytes(length)
            case _:
                if rng.random() < 0.3:
                    del changed[start:]
    return bytes(changed)


def mutation(name: str, reader: Reader, seed: int, number: int) -> bytes:
    """Return mutation `number` of a reader's valid files."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    return mutated(reader.valid[number % len(reader.valid)], rng)


def fuzz(
    name: str,
    reader: Reader,
    seed: int,
    numbers: Sequence[int],
    scratch: Path,
    report_progress: Callable[[int], None],
) -> Tally:
    """Read mutations and count the outcomes; `report_progress` is called with the number of each
    before it is read.
    """
    tally, path = Tally(), scratch / f"{name}.bin"
    signal.signal(signal.SIGALRM, _raise_timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydicom, about damaged files
        for number in numbers:
            report_progress(number)
            path.write_bytes(mutation(name, reader, seed, number))
            started = time.perf_counter()
            signal.alarm(SECONDS)
            try:
                reader.read(path)
                tally.read += 1
            except MedvlError as error:
                tally.rejected[type(error).__name__] += 1
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                text = (
                    f"mutation {number}: {type(error).__name__} in "
                    f"{Path(frame.filename).name}:{frame.lineno}"
                )
                tally.failures.append(text)
            finally:
                signal.alarm(0)
            tally.slowest = max(tally.slowest, time.perf_counter() - started)
    return tally


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"over {SECONDS} s")


def _in_process(name: str, seed: int, count: int, place: Any, results: Any) -> None:
    def report_progress(number: int) -> None:
        place.value = number

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders in Rust print caught panics
    with tempfile.TemporaryDirectory() as folder:
        reader = READERS[name](Path(folder))
        results.put(fuzz(name, reader, seed, range(count), Path(folder), report_progress))


def survey(name: str, seed: int, count: int) -> Tally:
    """Fuzz a reader in a process of its own; its abnormal exit is a failure."""
    context = multiprocessing.get_context("spawn")
    place, results = context.Value("q", -1), context.SimpleQueue()
    process = context.Process(target=_in_process, args=(name, seed, count, place, results))
    process.start()
    process.join()
    if process.exitcode == 0:
        return results.get()
    return Tally(failures=[f"mutation {place.value}: the process ended with {process.exitcode}"])


def main() -> None:
    """Run the fuzzer and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], help="default: all")
    parser.add_argument("--count", type=int, default=10_000, help="mutations per reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=int, help="repeat this mutation of one reader, with its traceback"
    )
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            (name,) = options.readers
            reader = READERS[name](Path(folder))
            (Path(folder) / "one.bin").write_bytes(
                mutation(name, reader, options.seed, options.only)
            )
            print(reader.read(Path(folder) / "one.bin"))
        return
    print(
        "| reader | mutations | read | rejected | failures | slowest |\n|---|---|---|---|---|---|"
    )
    failures: dict[str, list[str]] = {}
    for name in options.readers or READERS:
        tally = survey(name, options.seed, options.count)
        rejected = ", ".join(f"{count} {kind}" for kind, count in tally.rejected.most_common())
        cells = (
            name,
            options.count,
            tally.read,
            rejected or "–",
            len(tally.failures),
            f"{tally.slowest:.2f} s",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failures[name] = tally.failures
    for name, texts in failures.items():
        for text in texts[:20]:
            print(f"{name}: {text}")
    sys.exit(1 if any(failures.values()) else 0)


if __name__ == "__main__":
    main()
