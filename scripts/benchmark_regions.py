"""Benchmark of `medvl regions`, in images per second: reading alone, the detector alone, and both
with writing.

    python scripts/benchmark_regions.py --detectors grid:resnet50 --images 64
    python scripts/benchmark_regions.py --device cuda --detectors fasterrcnn_resnet50_fpn
        grid:resnet50 --batch 16

Weights are random, which do not change the time of a grid; the number of proposals of a Faster
R-CNN depends on them. The last column is the loader of a training run that reads the written
regions instead of pixels.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from medvl import phantom
from medvl.data import (
    Deidentifier,
    EvalTransform,
    RegionDetector,
    RegionOptions,
    ShardOptions,
    ShardRun,
    ShardSource,
    WholeText,
    no_text,
    open_loader,
    write_regions,
    write_shards,
)
from medvl.data.corpora.reports import mimic_cxr
from medvl.models import RegionSelection, create_region_detector
from medvl.schema import Inputs


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--detectors", nargs="+", default=["grid:resnet50", "fasterrcnn_resnet50_fpn"]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--size", type=int, default=512, help="short side of the phantom's images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4, help="threads that decode images")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        source = phantom_shards(Path(home), options.images, options.size)
        print(
            f"{len(source)} images of {options.size} px on {options.device}; the best of "
            f"{options.repeats}, images/s"
        )
        print(f"{'detector':32} {'read':>8} {'detect':>8} {'all':>8} {'loader':>8}")
        for name in options.detectors:
            detector = create_region_detector(
                name,
                random_weights=True,
                selection=RegionSelection(max_regions=36),
                device=options.device,
            )
            rates = measure(
                source,
                detector,
                RegionOptions(batch=options.batch, workers=options.workers),
                options.repeats,
            )
            print(f"{name:32} " + " ".join(f"{rate:8.1f}" for rate in rates))


def phantom_shards(home: Path, images: int, size: int) -> ShardSource:
    """Write shards of about `images` phantom radiographs."""
    phantom.write_mimic_cxr_jpg(home / "corpus", patients=max(8, images // 3), size=size)
    deid = Deidentifier(bytes(32))
    plan = mimic_cxr.MimicCXR(root=home / "corpus", split="train").plan(deid)
    write_shards(plan, deid, ShardRun(out=home / "shards"), ShardOptions(keep_textless=True))
    return ShardSource(home / "shards" / "train")


def measure(
    source: ShardSource, detector: RegionDetector, options: RegionOptions, repeats: int
) -> list[float]:
    """Return images per second of reading, of detecting, of the whole command, and of loading
    what it wrote.
    """
    positions = range(len(source))
    groups = [
        positions[start : start + options.batch] for start in range(0, len(source), options.batch)
    ]
    folder = Path(str(source.folder)) / "regions" / "benchmark"

    def read() -> None:
        for position in positions:
            detector.prepare(source.pixels(position, detector.color))

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        write_regions(source, detector, "benchmark", options)

    def load() -> None:
        opened = ShardSource(source.folder, regions="benchmark")
        settings: dict[str, Any] = {
            "image": EvalTransform(),
            "text": WholeText(),
            "tokenizer": no_text,
        }
        for _ in open_loader(
            opened, batch=options.batch, train=False, inputs=Inputs(regions=True), **settings
        ):
            pass

    prepared = [
        [detector.prepare(source.pixels(place, detector.color)) for place in group]
        for group in groups
    ]

    def detect() -> None:
        for images in prepared:
            detector(images)

    return [len(source) / best(step, repeats) for step in (read, detect, write, load)]


def best(step: Callable[[], None], repeats: int) -> float:
    """Return the shortest time of a step in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
