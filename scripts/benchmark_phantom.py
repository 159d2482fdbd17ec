"""Benchmark of the phantom on one core: drawing, ground truth, reports, encoded files.

    python scripts/benchmark_phantom.py
    python scripts/benchmark_phantom.py --images 400 --size 1024

Prints the best of several rounds in CPU time, to reduce the influence of other load. Target: at
least 100 images of 512 pixels per second.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import cv2

from medvl.phantom import World, boxes, compose_report, dicom_bytes, draw, encode_jpeg

Item = TypeVar("Item")


def rate(function: Callable[[Item], object], items: Sequence[Item], rounds: int) -> float:
    """Return calls per CPU second, the best of several rounds over all items."""
    function(items[0])  # noise fields and codecs are initialised on first use
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for item in items:
            function(item)
        best = min(best, time.process_time() - start)
    return len(items) / best


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200, help="views per round")
    parser.add_argument("--size", type=int, default=512, help="pixels of the longer side")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    world, size, rounds = World(0), arguments.size, arguments.rounds

    all_views = (
        (patient, study, view)
        for patient in map(world.patient, itertools.count())
        for study in patient.studies
        for view in study.views
    )
    selected = list(itertools.islice(all_views, arguments.images))
    views = [view for _, _, view in selected]
    studies = list({study.study_id: study for _, study, _ in selected}.values())
    frontal, lateral = ([view for view in views if view.lateral is side] for side in (False, True))

    print(f"patients          {rate(world.patient, range(500), rounds):8.0f} /s")
    print(f"reports           {rate(compose_report, studies, rounds):8.0f} /s")
    for name, some in (("all views", views), ("frontal", frontal), ("lateral", lateral)):
        print(
            f"draw {name:12s} {rate(lambda view: draw(view, size), some, rounds):8.1f} images/s "
            f"at {size} px"
        )
    print(f"boxes             {rate(lambda view: boxes(view, size), views, rounds):8.1f} views/s")
    print(
        f"draw + JPEG       "
        f"{rate(lambda view: encode_jpeg(draw(view, size)), views, rounds):8.1f} images/s"
    )
    dicom = rate(lambda item: dicom_bytes(*item, draw(item[2], size)), selected, rounds)
    print(f"draw + DICOM      {dicom:8.1f} images/s")


if __name__ == "__main__":
    main()
