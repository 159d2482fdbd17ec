"""Short run of scripts/fuzz.py: every reader reads a mutated file or raises one of medvl's
errors.
"""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.script_modules import load_script

forking = multiprocessing.get_context("fork")

COUNTS = {
    "dicom": 150,
    "image": 300,
    "report": 400,
    "table": 200,
    "tar": 120,
    "index": 250,
    "manifest": 250,
    "pickle": 400,
    "plain_pickle": 300,
    "safetensors": 300,
    "serve": 60,
    "nifti": 150,
    "npz": 100,
    "volume": 200,
    "series": 40,
    "parquet": 60,
    "zip": 100,
    "predictions": 150,
}


load_script("fuzz_readers")
fuzz = load_script("fuzz")


def test_every_reader_has_a_count() -> None:
    assert COUNTS.keys() == fuzz.READERS.keys()


@pytest.mark.fault("S15")
@pytest.mark.parametrize("name", fuzz.READERS)
def test_mutations_are_read_or_raise_an_error_of_medvl(name: str, tmp_path: Path) -> None:
    """Numbers from 10,000 on are other mutations than those of the script."""
    reader = fuzz.READERS[name](tmp_path)
    tally = fuzz.fuzz(
        name, reader, 0, range(10_000, 10_000 + COUNTS[name]), tmp_path, lambda number: None
    )
    assert not tally.failures
    assert tally.read > 0
    assert tally.rejected.total() > COUNTS[name] // 20
    assert tally.slowest < fuzz.SECONDS


def test_mutation_depends_on_seed_reader_and_number(tmp_path: Path) -> None:
    reader = fuzz.Reader(lambda path: None, [bytes(range(256)) * 8])
    first = [fuzz.mutation("report", reader, 0, number) for number in range(50)]
    assert first == [fuzz.mutation("report", reader, 0, number) for number in range(50)]
    assert len(set(first)) > 45
    assert fuzz.mutation("report", reader, 1, 3) != first[3] != fuzz.mutation("dicom", reader, 0, 3)


def test_other_errors_are_recorded_as_failures(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        if path.read_bytes()[:1] != b"\0":
            raise KeyError("x")

    tally = fuzz.fuzz(
        "x", fuzz.Reader(read, [bytes(100)]), 0, range(200), tmp_path, lambda number: None
    )
    assert tally.read
    assert tally.read + len(tally.failures) == 200
    assert tally.failures[0].endswith(
        f"KeyError in test_fuzz.py:{read.__code__.co_firstlineno + 2}"
    )


def _kill_itself(name: str, seed: int, count: int, place: Any, results: Any) -> None:
    place.value = 7
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_in_process", _kill_itself)
    monkeypatch.setattr(fuzz.multiprocessing, "get_context", lambda kind: forking)
    assert fuzz.survey("report", 0, 10).failures == ["mutation 7: the process ended with -9"]
