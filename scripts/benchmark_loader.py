"""Benchmark of the loader against a bare loop, in images per second and core.

    python scripts/benchmark_loader.py                        # 512 px grey JPEGs of the phantom
    python scripts/benchmark_loader.py --shards shards/mimic-cxr/train --workers 2

The bare loop decodes and augments the same JPEGs from memory, which every loader must do. The
loader also reads tars and JSON, samples a sentence, tokenises and collates, and with workers
transfers batches. Without workers, CPU seconds are measured, alternating batch by batch over the
same images so that other load affects both; the last line compares them with those of a loader that
leaves the augmentation to the device, likewise. With workers it is wall-clock time, and the bare
loop runs in as many processes.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch

from medvl import phantom
from medvl.data import (
    ConVIRTAugmentation,
    Deidentifier,
    Loader,
    RandomSentence,
    ShardRun,
    ShardSource,
    Tokenizer,
    open_loader,
    sample_rng,
    train_wordpiece,
    write_shards,
)
from medvl.data.corpora.reports import mimic_cxr
from medvl.schema import Batch


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shards", type=Path, help="a folder of JPEG shards; default: the phantom at 512 px"
    )
    parser.add_argument("--patients", type=int, default=260, help="patients of the phantom")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        source = ShardSource(options.shards or phantom_shards(Path(folder), options.patients))
        count = min(options.images, len(source)) // options.batch * options.batch
        if not count:
            parser.error(
                f"expected images for a batch of {options.batch}, got "
                f"{min(options.images, len(source))}"
            )
        texts = [
            text for position in range(count) for text in source.sample(position).sections.values()
        ]
        tokenizer = train_wordpiece(texts)
        sizes = Counter(source.pixels(position).shape for position in range(0, count, 37))
        print(
            f"{count} images of about {sizes.most_common(1)[0][0]} pixels; {options.repeats} "
            f"times, images/s"
        )
        for workers in options.workers:
            loader = make_loader(source, tokenizer, options.batch, workers)
            if not workers:
                for floor, rate in (
                    alternate(source, loader, count) for _ in range(options.repeats)
                ):
                    print(
                        f" 0 workers: bare loop {floor:6.0f} a core, loader {rate:6.0f}, "
                        f"{rate / floor:.2f} of it"
                    )
                for _ in range(options.repeats):
                    loaders = [
                        make_loader(source, tokenizer, options.batch, 0, on_device=on)
                        for on in (False, True)
                    ]
                    here, there = compare(loaders, count)
                    print(
                        f" 0 workers: {1000 * here:.3f} ms an image, {1000 * there:.3f} with "
                        f"augmentation on the "
                        f"device, {there / here:.2f} of it"
                    )
                continue
            floor = rate = 0.0
            for _ in range(options.repeats):
                floor = max(floor, parallel_bare_rate(source, count, workers))
                rate = max(rate, epoch(loader))
            share = rate / workers / floor
            print(
                f"{workers:2} workers: bare loop {floor:6.0f} a core, loader {rate:6.0f}, "
                f"{share:.2f} of it a core"
            )


def phantom_shards(folder: Path, patients: int) -> Path:
    """Write shards of phantom radiographs at 512 px."""
    phantom.write_mimic_cxr_jpg(folder / "corpus", patients=patients, size=512)
    deid = Deidentifier(bytes(32))
    write_shards(
        mimic_cxr.MimicCXR(root=folder / "corpus", split="train").plan(deid),
        deid,
        ShardRun(out=folder / "shards"),
    )
    return folder / "shards" / "train"


def make_loader(
    source: ShardSource, tokenizer: Tokenizer, batch: int, workers: int, *, on_device: bool = False
) -> Loader:
    """Return a training loader with ConVIRT's augmentation."""
    return open_loader(
        source,
        batch=batch,
        image=ConVIRTAugmentation(on_device=on_device),
        text=RandomSentence(),
        tokenizer=tokenizer,
        train=True,
        workers=workers,
    )


def endless(loader: Loader) -> Iterator[Batch]:
    """Yield the batches of a loader's epochs from its position on, one epoch after another."""
    while True:
        yield from loader


def alternate(source: ShardSource, loader: Loader, count: int) -> tuple[float, float]:
    """Return images per CPU second of the bare loop and of a loader without workers, measured in
    turns by batch.

    The bare loop processes the images of the previous batch, so that neither benefits from cached
    data.
    """
    positions = {source.key(position): position for position in range(len(source))}
    batches, floor, spent, done = endless(loader), 0.0, 0.0, 0
    previous = [positions[key] for key in next(batches).keys]
    while done < count:
        started = time.process_time()
        batch = next(batches)
        spent += time.process_time() - started
        floor += bare_seconds(source, previous, time.process_time)
        previous = [positions[key] for key in batch.keys]
        done += len(previous)
    return done / floor, done / spent


def compare(loaders: Sequence[Loader], count: int) -> list[float]:
    """Return the CPU seconds per image of loaders without workers, in turns by batch, without
    their first batches.
    """
    batches, spent, done = [endless(loader) for loader in loaders], [0.0] * len(loaders), 0
    first = [next(each) for each in batches]
    while done < count:
        for number, each in enumerate(batches):
            started = time.process_time()
            next(each)
            spent[number] += time.process_time() - started
        done += len(first[0])
    return [seconds / done for seconds in spent]


def bare_seconds(
    source: ShardSource, positions: Sequence[int], clock: Callable[[], float]
) -> float:
    """Return the seconds of decoding and augmenting images from memory."""
    data = [source.image_bytes(position) for position in positions]
    apply = ConVIRTAugmentation().build()
    rngs = [sample_rng(0, 0, str(position), "image") for position in positions]
    started = clock()
    for encoded, rng in zip(data, rngs, strict=True):
        apply(np.asarray(simplejpeg.decode_jpeg(encoded, colorspace="GRAY")), rng)
    return clock() - started


def parallel_bare_rate(source: ShardSource, count: int, processes: int) -> float:
    """Return images per second and process of bare loops in parallel processes."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(bare_seconds, [(source, range(8), time.perf_counter)] * processes, chunksize=1)
        seconds = pool.starmap(
            bare_seconds, [(source, range(count), time.perf_counter)] * processes, chunksize=1
        )
    return count / statistics.fmean(seconds)


def epoch(loader: Loader) -> float:
    """Return images per second over an epoch, without its first batch and the start of the
    workers.
    """
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    done = sum(len(batch) for batch in batches)
    return done / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
