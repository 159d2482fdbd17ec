"""Every Python script of `scripts/` runs at its smallest size, in the environment that
`scripts/setup.sh` makes.
"""

import importlib.util
import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALLEST = {
    "benchmark_checkpoints": "--parameters 0.001 --rounds 1",
    "benchmark_engine": "--images 0 --small 8 --engines local --workers 1 --plan 10 60",
    "benchmark_eval": "--images 40 --loop-resamples 2 --repeats 1",
    "benchmark_fusion": "--size tiny --batch 2",
    "benchmark_generation": "--size tiny --tokens 4 --batch 2",
    "benchmark_gloria": "--batch 4 --repeats 1",
    "benchmark_images": "--size tiny --seconds --batch 1 --repeats 1",
    "benchmark_loader": "--patients 8 --workers 0 --images 8 --batch 4 --repeats 1",
    "benchmark_alignment": "--batch 2 --words 6 --patches 4 --width 8 --repeats 1",
    "benchmark_losses": "--batch 64 --dim 8 --repeats 1 --losses info_nce --forms blocks",
    "benchmark_phantom": "--images 8 --size 64 --rounds 1",
    "benchmark_plan": "20",
    "benchmark_systems": "--size tiny --systems mavl,mrm,m2i2,arl,berthop,lvit,uniter --tokens "
    "16 --statements 2",
    "benchmark_remote": "--patients 4 --images 8 --batch 4 --repeats 1 --per-shard 4",
    "benchmark_regions": "--images 4 --size 64 --repeats 1 --batch 2 --workers 1 --detectors "
    "grid:resnet_tiny",
    "benchmark_serve": "--users 4 --rounds 1 --routes scores",
    "benchmark_shards": "--images 2 --size 64 --repeats 1",
    "benchmark_text": "--size small --batch 2 --steps 1",
    "benchmark_train": "--batch 4 --workers 0 --steps 1 --repeats 1 --patients 12 --image-size 64",
}
"""Arguments of the smallest run of a script."""
SLOW = {"benchmark_fusion", "benchmark_loader", "benchmark_serve", "benchmark_train"}
HELP = {
    **dict.fromkeys(("slake", "vqa_rad", "zeroshot_chexpert"), "run by tests of medvl.eval"),
    **dict.fromkeys(
        ("fault_matrix", "fuzz", "soak"), "run tests; by a test of its own; trains for minutes"
    ),
    **dict.fromkeys(("compare_berthop", "compare_segmentation"), "train for minutes"),
    "benchmark_gpu": "run by a test of its own",
    "benchmark_packing": "needs the data of a benchmark",
    **dict.fromkeys(
        ("build_docs", "pretraining_helps", "results"),
        "need medvl[docs], a checkpoint, results of runs",
    ),
}
"""Scripts of which only the help is printed, and why."""
MODULES = {
    "fuzz_readers",
    "open_clip_baseline",
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
    assert {path.stem for path in SCRIPTS.glob("*.py")} == SMALLEST.keys() | HELP.keys() | MODULES


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(SMALLEST)
    ],
)
def test_script_runs_at_its_smallest_size(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "benchmark_train" and importlib.util.find_spec("pandas") is None:
        pytest.skip("medvl[bench] is not installed")
    assert run(name, SMALLEST[name], monkeypatch) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_the_benchmark_of_the_loader_reads_on_where_an_epoch_ends(batches: int) -> None:
    """A loader goes on behind the last batch that was read, which may be the last one of its
    epoch.
    """
    jpeg = simplejpeg.encode_jpeg(np.zeros((64, 64, 1), np.uint8), colorspace="GRAY")

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

    script = runpy.run_path(str(SCRIPTS / "benchmark_loader.py"))
    loader = PairLoader()
    for _ in range(3):
        assert min(script["alternate"](Source(), loader, 4)) > 0


@pytest.mark.parametrize("name", sorted(HELP))
def test_script_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help", monkeypatch) == 0
    assert "usage:" in capsys.readouterr().out
