"""The fault matrix from a test run: what happens to a run, which tests prove it, and whether they passed.

    python scripts/fault_matrix.py                      # prints the table
    python scripts/fault_matrix.py --write              # ... into RELIABILITY.md
    python scripts/fault_matrix.py F5 S4                # these items only

A test proves an item by `@pytest.mark.fault("F5")`. Exit status 1 where a test failed or an item has none that passed.
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
PAGE = ROOT / "RELIABILITY.md"
ITEMS = {
    "F1": (
        "kill -9 before every operation on the files of a checkpoint",
        "the old checkpoint or the new one; the resumed run has the undisturbed weights",
    ),
    "F2": (
        "the disk is full, or refuses to flush",
        "training goes on, saving is tried again and counted, records are kept and written later",
    ),
    "F3": (
        "the newest checkpoint is cut, flipped, emptied or partly missing",
        "the one before is taken, and it is said; the damaged one is put aside",
    ),
    "F4": ("SIGTERM or Ctrl-C, to one rank or to all", "the step is ended, saved, exit status 0"),
    "F5": (
        "a rank is killed under torchrun",
        "all start again from the last checkpoint; the curve is equal bit for bit",
    ),
    "F6": (
        "a loader's worker dies, hangs or is stopped",
        "LoaderError with advice; no deadlock, no process left behind",
    ),
    "F7": ("cut off at any batch, and resumed", "the same batches, weights and records, bit for bit"),
    "F8": ("resumed with another number of workers", "the same batches; for the recipe the same weights"),
    "F9": ("resumed on another number of ranks", "the same samples in each global batch"),
    "F10": ("from DDP to one process, from GPU to CPU and back", "the run goes on"),
    "F11": (
        "shards cut, zeroed, with bad headers, lost, doubled or exchanged members, wrong suffixes, no UTF-8, no report",
        "refused when opened, or counted as skipped; `medvl verify` names each",
    ),
    "F12": ("unreadable samples", "within the budget counted and named, beyond it BudgetError"),
    "F13": ("ranks that would get no data", "ConfigError with the remedy in under 5 s"),
    "F14": (
        "a loss or gradient that is not finite; weights gone astray",
        "the update is left out, its samples are named; after four in a row back to an earlier checkpoint; budgets",
    ),
    "F15": ("a loss ten times the median", "with `spike_factor` the update is left out and its samples named"),
    "F16": ("out of memory", "TrainingError with the peak and the settings that need less"),
    "F17": ("the same seed twice, another seed, a clock that jumps", "equal bits, other weights, no difference"),
    "F18": ("settings through JSON; an unknown one", "the same values and types; the nearest name is told"),
    "F19": (
        "a second run in the same folder",
        "refused, with the process that holds it; the lock dies with its process",
    ),
    "F20": ("a file system that shows new names late", "waited for; nothing is taken for missing"),
    "N1": (
        "losses in blocks, in chunks, gathered from ranks",
        "the naive formula, in value and gradient",
    ),
    "N2": ("accumulation, and GradCache for batches beyond memory", "the gradient of the batch at once"),
    "N3": ("compiled models and losses", "the plain ones' steps, and no new graph for each length of text"),
    "N4": ("16 bits", "losses compute in float32, weights stay in it, and follow a run of 32 bits"),
    "N5": ("moving averages of weights (ALBEF)", "by their formula, and not trained"),
    "N6": ("packed texts", "values and gradients of padded ones"),
    "N7": ("every encoder", "samples do not mix, padding changes nothing, every parameter learns"),
    "N8": ("export to open_clip, Hugging Face and ONNX", "the same embeddings"),
    "N9": ("what the recipes train", "the losses of their first fifty steps are those of before"),
    "S1": ("weights that are a pickle", "refused, never run"),
    "S2": ("a torch whose guarded reader can be made to run code", "not accepted as a dependency"),
    "S3": ("safetensors with huge headers, overlaps, holes", "refused by type"),
    "S4": (
        "tars with ../, links, devices, sparse and extended headers, endless members",
        "refused at the header, in bounded memory; nothing is unpacked",
    ),
    "S5": ("DICOM bombs of 23 kinds", "under 512 MB; a worker's memory is capped, and who outgrows it is skipped"),
    "S6": ("JPEG and PNG bombs", "refused by the header, under 512 MB and 2 s"),
    "S7": ("a DICOMDIR that names other files", "no image; no reference is followed"),
    "S8": ("eval, exec, pickle, yaml, shell, trust_remote_code in the code", "a scan of the syntax trees finds none"),
    "S9": (
        "names, numbers, dates and private tags in DICOM files and reports",
        "not in shards, vocabulary, logs, errors, checkpoints, results or pages",
    ),
    "S10": ("text burned into the pixels", "counted as a warning, and so is a header that says so"),
    "S11": ("a patient in training and in evaluation", "SplitError, whether or not anybody asked"),
    "S12": ("files of the hub", "pinned by commit, compared by hash; offline no socket is opened"),
    "S13": ("folders and addresses of any name", "work, or are refused before a command line sees them"),
    "S14": ("markup in names and texts on a page", "shown as text; no script can run"),
    "S15": ("mutated DICOM files, images, reports, tars, indexes, manifests, checkpoints", "read, or refused by type"),
    "P3": ("`import medvl.encoders`", "without the libraries for data, and without the rest of medvl"),
}


@dataclasses.dataclass
class Proof:
    """The runs of one test function that prove an item."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        counts = {"passed": self.passed, "FAILED": self.failed, "skipped": self.skipped}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


class Collector:
    """Runs only marked tests, and keeps what became of them: item -> file and function -> proof."""

    def __init__(self, wanted: list[str]) -> None:
        self.proofs: dict[str, dict[str, Proof]] = defaultdict(lambda: defaultdict(Proof))
        self._wanted = set(wanted)
        self._items: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the marked ones."""
        for item in items:
            self._items[item.nodeid] = {marker.args[0] for marker in item.iter_markers("fault")} & self._wanted
        config.hook.pytest_deselected(items=[item for item in items if not self._items[item.nodeid]])
        items[:] = [item for item in items if self._items[item.nodeid]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test by its outcome; one whose fixture fails has failed."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("[")[0].removeprefix("tests/").replace(".py::", "::")
        for item in self._items[report.nodeid]:
            proof = self.proofs[item][name]
            setattr(proof, report.outcome, getattr(proof, report.outcome) + 1)


def table(collector: Collector, wanted: list[str]) -> tuple[str, bool]:
    """The table as Markdown, and whether every item is proved."""
    lines = ["| | fault | what happens | tests |", "|---|---|---|---|"]
    sound = True
    for item in wanted:
        proofs = collector.proofs[item]
        sound &= any(proof.passed for proof in proofs.values()) and not any(proof.failed for proof in proofs.values())
        tests = "<br>".join(f"`{name}`: {proof}" for name, proof in sorted(proofs.items())) or "NONE"
        lines.append(f"| {item} | {ITEMS[item][0]} | {ITEMS[item][1]} | {tests} |")
    return "\n".join(lines) + "\n", sound


def page(text: str) -> str:
    """RELIABILITY.md."""
    versions = f"medvl {medvl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    machine = "a GPU" if torch.cuda.is_available() else "no GPU"
    return (
        "# What a run of medvl survives, and what it refuses\n\n"
        "Written by `python scripts/fault_matrix.py --write` from a run of the tests it names, on "
        f"{platform.system()} with {machine} ({versions}). F are faults, N is numerics, S is security, P is speed, of "
        f"which `PERFORMANCE.md` has what takes a clock.\n\n{text}\n"
        "More than the tests have time for: `python scripts/fuzz.py` (10,000 mutations of each reader) and "
        "`python scripts/soak.py` (an hour of kills, damage and resumes; memory over 10,000 steps).\n"
    )


def main() -> None:
    """Run the marked tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="ITEM", help="default: all")
    parser.add_argument("--write", action="store_true", help="write RELIABILITY.md")
    options = parser.parse_args()
    unknown = [item for item in options.items if item not in ITEMS]
    if unknown:
        sys.exit(f"no item {', '.join(unknown)}: F1 to F20, N1 to N9, S1 to S15, P3")
    wanted = options.items or list(ITEMS)
    collector = Collector(wanted)
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.fault(" in path.read_text()]
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *files], plugins=[collector])
    text, sound = table(collector, wanted)
    print(text)
    if options.write:
        PAGE.write_text(page(text))
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
