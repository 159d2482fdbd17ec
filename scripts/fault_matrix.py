"""Fault matrix from a test run: faults, expected behaviour, and the tests that check it.

    python scripts/fault_matrix.py                      # print the table
    python scripts/fault_matrix.py --write              # write docs/pages/reliability.md
    python scripts/fault_matrix.py F5 S4                # these items only

Tests are marked with `@pytest.mark.fault("F5")`. The exit status is 1 if a test fails or an item
has no passing test.
"""

import argparse
import dataclasses
import platform
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import medvl

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/pages/reliability.md"
ITEMS = {
    "F1": (
        "kill -9 before every file operation of a checkpoint",
        "the old or the new checkpoint is intact; the resumed run has the weights of the "
        "undisturbed one",
    ),
    "F2": (
        "full disk, or failing fsync",
        "training continues; saving is retried and counted; records are buffered and written later",
    ),
    "F3": (
        "newest checkpoint truncated, corrupted, emptied or incomplete",
        "the previous one is loaded and logged; the damaged one is moved aside",
    ),
    "F4": (
        "SIGTERM or Ctrl-C on one rank or on all",
        "the step is finished and saved; exit status 0, of Ctrl-C on a single rank 130",
    ),
    "F5": (
        "rank killed under torchrun",
        "all ranks restart from the last checkpoint; the curve is bitwise equal",
    ),
    "F6": (
        "loader worker killed, hanging or stopped",
        "LoaderError with advice; no deadlock, no orphan process",
    ),
    "F7": (
        "interruption at any batch, then resume",
        "same batches, weights and records, bitwise equal",
    ),
    "F8": ("resume with another number of workers", "same batches; same weights for the recipe"),
    "F9": ("resume on another number of ranks", "same samples in each global batch"),
    "F10": ("from DDP to one process, from GPU to CPU and back", "training continues"),
    "F11": (
        "shards truncated or zeroed; headers damaged; members lost, duplicated, exchanged or "
        "misnamed; invalid UTF-8",
        "error on opening, or counted as skipped; `medvl verify` names each",
    ),
    "F12": ("unreadable samples", "within the budget counted and named, beyond it BudgetError"),
    "F13": ("ranks without data", "ConfigError with advice in under 5 s"),
    "F14": (
        "non-finite loss or gradient; diverged weights",
        "the update is skipped and its samples are named; rollback after four in a row; budgets",
    ),
    "F15": (
        "loss ten times the median",
        "with `spike_factor` the update is skipped and its samples are named",
    ),
    "F16": ("out of memory", "TrainingError with the peak and the settings that reduce it"),
    "F17": (
        "same seed twice, another seed, clock jumps",
        "bitwise equal, other weights, no difference",
    ),
    "F18": (
        "settings through JSON; an unknown setting",
        "same values and types; the error names the nearest setting",
    ),
    "F19": (
        "second run in the same folder",
        "error that names the process with the lock; the lock is released when that process ends",
    ),
    "F20": ("file system with delayed visibility of new names", "wait; nothing counts as missing"),
    "N1": (
        "losses in blocks, in chunks, gathered from ranks",
        "value and gradient of the naive formula",
    ),
    "N2": ("gradient accumulation, and GradCache", "gradient of the full batch"),
    "N3": (
        "compiled models and losses",
        "steps of the eager ones, without a new graph per text length",
    ),
    "N4": ("16 bits", "losses in float32, weights in float32, close to a run in 32 bits"),
    "N5": ("moving averages of weights (ALBEF)", "equal to their formula, and not trained"),
    "N6": ("packed texts", "values and gradients of padded texts"),
    "N7": (
        "every encoder",
        "samples are independent, padding changes nothing, every parameter gets a gradient",
    ),
    "N8": ("export to open_clip, Hugging Face and ONNX", "equal embeddings"),
    "N9": ("training of the recipes", "the losses of the first steps are the recorded ones"),
    "S1": ("pickled weights", "error, never executed"),
    "S2": (
        "torch version whose restricted reader can execute code",
        "not accepted as a dependency",
    ),
    "S3": ("safetensors with huge headers, overlaps, gaps", "error of medvl's type"),
    "S4": (
        "tars with ../, links, devices, sparse and extended headers, endless members",
        "error at the header, in bounded memory; nothing is unpacked",
    ),
    "S5": (
        "DICOM bombs of 23 kinds",
        "under 512 MB; a worker's memory is limited, and files above it are skipped",
    ),
    "S6": ("JPEG and PNG bombs", "error before decoding, under 512 MB and 2 s"),
    "S7": ("DICOMDIR that names other files", "no image; references are not followed"),
    "S8": (
        "eval, exec, pickle, yaml, shell, trust_remote_code in the code",
        "a scan of the syntax trees finds none",
    ),
    "S9": (
        "names, numbers, dates and private tags in DICOM files and reports",
        "not in shards, vocabulary, logs, errors, checkpoints, results or pages",
    ),
    "S10": ("text burned into the pixels", "counted as a warning, as is a header that declares it"),
    "S11": ("patient in training and in evaluation", "SplitError, always"),
    "S12": (
        "files of the hub",
        "pinned by commit, checked by hash; no network access when offline",
    ),
    "S13": (
        "folders and addresses with unusual names",
        "work, or are rejected before a command line receives them",
    ),
    "S14": ("markup in names and texts on a page", "escaped; no script can run"),
    "S15": (
        "mutated DICOM files, images, reports, tars, indexes, manifests, checkpoints",
        "read, or an error of medvl",
    ),
    "S16": (
        "links out of a corpus; pipes, devices, sockets and folders instead of files; "
        "impossible paths",
        "counted as skipped, tables raise; nothing outside is read without --follow-links",
    ),
    "S17": (
        "nested JSON, half surrogate pairs, endless lines and cells, wrong types in a sample",
        "error of medvl's type, or counted as skipped; in bounded memory",
    ),
    "P3": ("`import medvl.encoders`", "imports no data library and no other part of medvl"),
}


@dataclasses.dataclass
class Outcomes:
    """Outcomes of a test function that checks an item."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """Return " (N, M skipped)" with the number of cases; of a single one that passed, ""."""
        counts = {"": self.passed, " FAILED": self.failed, " skipped": self.skipped}
        cases = ", ".join(f"{count}{word}" for word, count in counts.items() if count)
        return "" if cases == "1" else f" ({cases})"


class Collector:
    """pytest plugin that selects marked tests and records their outcomes: item -> file and
    function -> outcomes.
    """

    def __init__(self, requested: list[str]) -> None:
        self.outcomes: dict[str, dict[str, Outcomes]] = defaultdict(lambda: defaultdict(Outcomes))
        self._requested = set(requested)
        self._items: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests without a requested item."""
        for item in items:
            self._items[item.nodeid] = {
                marker.args[0] for marker in item.iter_markers("fault")
            } & self._requested
        config.hook.pytest_deselected(
            items=[item for item in items if not self._items[item.nodeid]]
        )
        items[:] = [item for item in items if self._items[item.nodeid]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of a test; a failing fixture counts as a failure."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("[")[0].rpartition("/")[2].replace(".py::", "::")
        for item in self._items[report.nodeid]:
            outcome = self.outcomes[item][name]
            setattr(outcome, report.outcome, getattr(outcome, report.outcome) + 1)


def table(collector: Collector, requested: list[str]) -> tuple[str, bool]:
    """Return the table as Markdown, and whether every item has passing tests and no failing one."""
    lines = ["| | fault | what happens | tests |", "|---|---|---|---|"]
    all_passed = True
    for item in requested:
        outcomes = collector.outcomes[item]
        all_passed &= any(outcome.passed for outcome in outcomes.values()) and not any(
            outcome.failed for outcome in outcomes.values()
        )
        tests = (
            "<br>".join(f"`{name}`{outcome}" for name, outcome in sorted(outcomes.items()))
            or "NONE"
        )
        lines.append(f"| {item} | {ITEMS[item][0]} | {ITEMS[item][1]} | {tests} |")
    return "\n".join(lines) + "\n", all_passed


def page(text: str) -> str:
    """Return the content of docs/pages/reliability.md."""
    versions = (
        f"medvl {medvl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    machine = "a GPU" if torch.cuda.is_available() else "no GPU"
    return (
        "# Reliability\n\n"
        "Written by `python scripts/fault_matrix.py --write`, which runs the tests below: on "
        f"{platform.system()} with {machine} ({versions}). Numbers count the cases of a test; all "
        f"others have one. F: faults, N: numerics, S: security, P: [performance](performance.md)."
        f"\n\n{text}\n"
        "Longer checks outside the test suite: `python scripts/fuzz.py` (10,000 mutations per "
        "reader) and "
        "`python scripts/soak.py` (an hour of kills, damage and resumes; memory over 10,000 "
        "steps).\n"
    )


def main() -> None:
    """Run the marked tests and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("items", nargs="*", metavar="ITEM", help="default: all")
    parser.add_argument("--write", action="store_true", help="write docs/pages/reliability.md")
    options = parser.parse_args()
    unknown = [item for item in options.items if item not in ITEMS]
    if unknown:
        sys.exit(
            f"unknown items {', '.join(unknown)}; choose from F1 to F20, N1 to N9, S1 to S17, P3"
        )
    requested = options.items or list(ITEMS)
    collector = Collector(requested)
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.fault(" in path.read_text()
    ]
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *files], plugins=[collector])
    text, all_passed = table(collector, requested)
    print(text)
    if options.write:
        PAGE.write_text(page(text))
    sys.exit(0 if all_passed else 1)


if __name__ == "__main__":
    main()
