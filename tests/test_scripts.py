"""Every Python script of `scripts/` prints its help, in the environment that `scripts/setup.sh`
makes.
"""

import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"
HELP = {
    **dict.fromkeys(("slake", "vqa_rad", "zeroshot_chexpert"), "run by tests of medvl.eval"),
    **dict.fromkeys(
        ("fault_matrix", "fuzz", "soak"), "run tests; by a test of its own; trains for minutes"
    ),
    **dict.fromkeys(("boxes_nih", "compare_berthop", "compare_segmentation"), "train for minutes"),
    **dict.fromkeys(("benchmark", "gpu_tests"), "run by tests/test_benchmark_gpu.py"),
    **dict.fromkeys(
        ("build_docs", "make_demo", "pretraining_helps", "results"),
        "need medvl[docs], a checkpoint, results of runs",
    ),
}
"""Scripts of which only the help is printed, and why."""
MODULES = {
    "fuzz_readers",
    "vqa_corpora",
}
"""Parts of other scripts."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, level, path = torch.get_num_threads(), logging.root.manager.disable, list(sys.path)
    yield
    torch.set_num_threads(threads)
    logging.disable(level)
    sys.path[:] = path


def run(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a script as a program in this process; return its exit status, 0 if it ended without
    one.
    """
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


def test_every_script_is_listed() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == HELP.keys() | MODULES


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_the_benchmark_of_the_loader_reads_on_where_an_epoch_ends(
    batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader goes on behind the last batch that was read, which may be the last one of its
    epoch.
    """
    jpeg = simplejpeg.encode_jpeg(np.zeros((64, 64, 1), np.uint8), colorspace="GRAY")

    monkeypatch.syspath_prepend(str(SCRIPTS))

    class Source:
        """One image under many keys."""

        def __len__(self) -> int:
            return 2 * batches

        def key(self, position: int) -> str:
            return f"{position}"

        def image_bytes(self, position: int) -> bytes:
            return jpeg

    class PairLoader:
        """Batches of two images, with the position of `medvl.data.Loader`."""

        position = 0

        def __iter__(self) -> Iterator[SimpleNamespace]:
            for number in range(self.position, batches):
                self.position += 1
                yield SimpleNamespace(keys=[f"{2 * number}", f"{2 * number + 1}"])
            self.position = 0

    from lines.loader import alternate

    loader: Any = PairLoader()
    source: Any = Source()
    for _ in range(3):
        assert min(alternate(source, loader, 4)) > 0


@pytest.mark.parametrize("name", sorted(HELP))
def test_script_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help", monkeypatch) == 0
    assert "usage:" in capsys.readouterr().out
