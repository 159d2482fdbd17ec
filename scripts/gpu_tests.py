"""The tests marked gpu under a time limit: outcomes are kept, and the next call runs the tests that
are left.

    python scripts/gpu_tests.py --out gpu --minutes 9

Outcomes are lines of tests.jsonl in the folder `--out`. The program starts pytest with this module
as a plugin, which appends the start and the outcome of each test to that file.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = "tests.jsonl"
_FILE, _END = "GPU_TESTS_FILE", "GPU_TESTS_END"
"""Environment variables of the plugin: the file of outcomes, and the time limit on the clock of
`time.time`.
"""
_CLOSING = 20.0
"""Seconds that a test which runs at the time limit has to end."""
_MESSAGE = 300

Outcomes = dict[str, dict[str, Any]]


def main() -> int:
    """Run the command line and return the exit status: 0 if all tests have passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of tests.jsonl")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the call")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return run(Path(__file__).parents[1], options.out, 60 * options.minutes)


def run(root: Path, folder: Path, seconds: float) -> int:
    """Run the tests marked gpu that have not passed yet, print a summary, and return 0 if all of
    them have passed.

    A test that runs at the time limit is ended and counts as started; in the next call it is the
    last one.
    """
    path, end = folder / OUTCOMES, time.time() + seconds
    limits = {_FILE: str(path.absolute()), _END: str(end - _CLOSING)}
    paths = os.pathsep.join(
        [str(root), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    offline = {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}
    # Deterministic products of matrices need it in some versions of torch.
    environment = (
        os.environ | limits | offline | {"PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    )
    options = [
        "-p",
        "gpu_tests",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "--continue-on-collection-errors",
    ]
    with (folder / "tests.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files_on_a_device(root / "tests")],
            cwd=root,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(max(0.0, end - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers of its loaders
            status = process.wait()
    outcomes = read(path)
    print(summarize(outcomes))
    bad = any(outcome["outcome"] != "passed" for outcome in outcomes.values())
    return int(bad or status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED))


def files_on_a_device(folder: Path) -> list[str]:
    """Return the files that may have tests marked gpu: to collect all others as well would take
    most of a minute.
    """
    named = re.compile(r"device: torch\.device|mark\.gpu")
    files = sorted(folder.rglob("test_*.py"))
    return [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))]


def read(path: Path) -> Outcomes:
    """Return the last outcome of each test: passed, failed, skipped, started (and not ended), or
    left.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def summarize(outcomes: Outcomes) -> str:
    """Return the number of tests of each outcome, and the names of those that did not pass."""
    by_outcome: dict[str, list[str]] = {}
    for test, entry in outcomes.items():
        by_outcome.setdefault(entry["outcome"], []).append(
            f"{test}: {entry['message']}" if entry["message"] else test
        )
    counts = ", ".join(f"{len(tests)} {outcome}" for outcome, tests in by_outcome.items())
    rest = [
        f"- {outcome}: {test}"
        for outcome, tests in by_outcome.items()
        if outcome != "passed"
        for test in tests
    ]
    return "\n".join([f"Tests marked gpu: {counts or 'none ran'}.", *rest])


class _Recorder:
    """Plugin of pytest that leaves out what has passed, stops at the time limit, and writes
    outcomes at once.
    """

    def __init__(self, path: Path, end: float) -> None:
        self._path, self._end, self._before = path, end, read(path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that have passed or were skipped; those that did not end before
        come last.
        """
        done = {
            test
            for test, entry in self._before.items()
            if entry["outcome"] in ("passed", "skipped")
        }
        unfinished = {test for test, entry in self._before.items() if entry["outcome"] == "started"}
        items[:] = sorted(
            (item for item in items if item.nodeid not in done and item.get_closest_marker("gpu")),
            key=lambda item: item.nodeid in unfinished,
        )
        for item in items:
            if item.nodeid not in self._before:
                self._write(item.nodeid, "left")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test starts."""
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome: that of the call, or of a fixture that failed or skipped it."""
        if report.when == "call" or not report.passed:
            self._write(
                report.nodeid, report.outcome, "" if report.passed else _reason(report.longreprtext)
            )

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Stop after the test that ends behind the time limit."""
        yield
        if time.time() > self._end:
            item.session.shouldstop = "the time limit"

    def _write(self, test: str, outcome: str, message: str = "") -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "message": message}) + "\n")


def _reason(text: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = text.strip().splitlines() or [""]
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:_MESSAGE]


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(_Recorder(Path(os.environ[_FILE]), float(os.environ[_END])))


if __name__ == "__main__":
    sys.exit(main())
