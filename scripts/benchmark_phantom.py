"""How fast the phantom is on one core: drawing, truth, reports, whole files.

    python scripts/benchmark_phantom.py
    python scripts/benchmark_phantom.py --images 400 --size 1024

Prints the best of several rounds in CPU time, so that other work on the machine counts little. The goal for drawing
is at least 100 images of 512 pixels a second.
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
    """Calls a second of CPU time, the best of some rounds over all items."""
    function(items[0])  # noise fields and codecs are made on first use
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for item in items:
            function(item)
        best = min(best, time.process_time() - start)
    return len(items) / best


def main() -> None:
    """Draw, state and encode the same views, and print how many a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="views to draw in a round")
    parser.add_argument("--size", type=int, default=512, help="pixels of the longer side")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    world, size, rounds = World(0), arguments.size, arguments.rounds

    everything = (
        (patient, study, view)
        for patient in map(world.patient, itertools.count())
        for study in patient.studies
        for view in study.views
    )
    taken = list(itertools.islice(everything, arguments.images))
    views = [view for _, _, view in taken]
    studies = list({study.study_id: study for _, study, _ in taken}.values())
    frontal, lateral = ([view for view in views if view.lateral is side] for side in (False, True))

    print(f"patients          {rate(world.patient, range(500), rounds):8.0f} /s")
    print(f"reports           {rate(compose_report, studies, rounds):8.0f} /s")
    for name, some in (("all views", views), ("frontal", frontal), ("lateral", lateral)):
        print(f"draw {name:12s} {rate(lambda view: draw(view, size), some, rounds):8.1f} images/s at {size} px")
    print(f"boxes             {rate(lambda view: boxes(view, size), views, rounds):8.1f} views/s")
    print(f"draw + JPEG       {rate(lambda view: encode_jpeg(draw(view, size)), views, rounds):8.1f} images/s")
    dicom = rate(lambda item: dicom_bytes(*item, draw(item[2], size)), taken, rounds)
    print(f"draw + DICOM      {dicom:8.1f} images/s")


if __name__ == "__main__":
    main()
