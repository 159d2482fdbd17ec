"""The loader beside bare decoding and augmentation, and decoding of JPEG files on the GPU.

The bare loop decodes and augments the same grey JPEGs of the phantom from memory, in full, which
every loader must do. The loader also reads tars and JSON, samples a sentence, tokenises and
collates; with `decode="reduced"` it decodes less. Without workers, CPU seconds are measured in
turns by batch over the same images, so that other load affects both.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from measure.bench import Bench
from measure.line import Line, Report, Row, SkipLine, TableRow, ratio, report

from medvl import phantom
from medvl.common.process import keep_freed_memory  # internal, as in `packing`
from medvl.data import (
    ConVIRTAugmentation,
    Deidentifier,
    Loader,
    RandomSentence,
    ShardOptions,
    ShardRun,
    ShardSource,
    Tokenizer,
    open_loader,
    sample_rng,
    train_wordpiece,
    write_shards,
)
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.transforms import text  # internal: its memory of texts
from medvl.data.transforms.operations import Decode, augment_batch
from medvl.schema import Batch
from medvl.train.doctor.examine import seconds_of  # internal, as in `measure.timing`

BATCH, FILES = 64, 192
UNIT = "images/s"


def measure_on_one_core(bench: Bench) -> Report:
    """Measure a loader without workers and the bare loop, in images per CPU second."""
    patients, images, batch, repeats = bench.size((260, 192, 32, 3), (8, 8, 4, 1))
    source = ShardSource(phantom_shards(bench.folder / "loader", patients, 512))
    loader = make_loader(source, vocabulary(source, images), batch, 0)
    pairs = [alternate(source, loader, images) for _ in range(repeats)]
    shares = [rate / floor for floor, rate in pairs]
    rates = [rate for _, rate in pairs]
    figures = {
        "least share": min(shares),
        "largest share": max(shares),
        "least images/s": min(rates),
        "largest images/s": max(rates),
    }
    return report([], figures)


def measure_reduced(bench: Bench) -> Report:
    """Measure loaders that decode in full and at a reduced size, in turns with the bare loop, on
    images of 512 and of 1,024 px.
    """
    patients, images, batch, repeats = bench.size((60, 96, 32, 3), (8, 8, 4, 1))
    figures: dict[str, float] = {}
    for side in (512, 1024):
        source = ShardSource(phantom_shards(bench.folder / f"loader-{side}", patients, side))
        tokenizer = vocabulary(source, images)
        shares: dict[Decode, list[float]] = {"full": [], "reduced": []}
        loaders = {way: make_loader(source, tokenizer, batch, 0, decode=way) for way in shares}
        for _ in range(repeats):
            for way, loader in loaders.items():
                floor, rate = alternate(source, loader, images)
                shares[way].append(rate / floor)
        for way, of_bare in shares.items():
            figures[f"{way} at {side} px, of the bare loop"] = statistics.median(of_bare)
    return report([], figures)


def phantom_shards(folder: Path, patients: int, side: int) -> Path:
    """Write shards of phantom radiographs with a short side of `side` pixels."""
    phantom.write_mimic_cxr_jpg(folder / "corpus", patients=patients, size=side, workers=1)
    deid = Deidentifier(bytes(32))
    write_shards(
        mimic_cxr.MimicCXR(root=folder / "corpus", split="train").plan(deid),
        deid,
        ShardRun(out=folder / "shards", workers=1),
        ShardOptions(short_side=side),
    )
    return folder / "shards" / "train"


def vocabulary(source: ShardSource, count: int) -> Tokenizer:
    """Return a tokenizer of the first samples' reports."""
    places = range(min(count, len(source)))
    return train_wordpiece(
        text for place in places for text in source.sample(place).sections.values()
    )


def make_loader(
    source: ShardSource,
    tokenizer: Tokenizer,
    batch: int,
    workers: int,
    *,
    on_device: bool = False,
    decode: Decode = "full",
) -> Loader:
    """Return a training loader with ConVIRT's augmentation."""
    return open_loader(
        source,
        batch=batch,
        image=ConVIRTAugmentation(on_device=on_device, decode=decode),
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
    keep_freed_memory()  # as in training
    batches, floor, spent, done = endless(loader), 0.0, 0.0, 0
    previous = [positions[key] for key in next(batches).keys]
    while done < count:
        text._split.cache_clear()  # as in a corpus of more texts than this memory holds
        started = time.process_time()
        batch = next(batches)
        spent += time.process_time() - started
        floor += bare_seconds(source, previous, time.process_time)
        previous = [positions[key] for key in batch.keys]
        done += len(previous)
    return done / floor, done / spent


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


def measure_loader(bench: Bench) -> Report:
    """Measure the loader with the paper's augmentation, and decoding and augmentation alone on
    one core.
    """
    source = ShardSource(bench.data())
    batch, workers = bench.size(BATCH, 4), bench.data_size.workers
    count = min(len(source), bench.size(400, 8))
    loader = make_loader(source, vocabulary(source, count), batch, workers)
    ours = Row(contender=f"medvl: loader, {workers} workers", unit=UNIT)
    ours.rate = rate_of(loader, bench.size(6.0, 0.1))
    bare = Row(contender="decoding and augmentation alone, one core", unit=UNIT)
    bare.rate = count / bare_seconds(source, range(count), time.perf_counter)
    share = ratio(ours.rate, bare.rate * workers)
    return report([ours, bare], {UNIT: ours.rate, "of one core's rate times the workers": share})


def measure_decoding_on_device(bench: Bench) -> Report:
    """Measure the loader whose JPEG files are decoded and augmented on the device, and one whose
    workers decode them.
    """
    source = ShardSource(bench.data())
    batch, workers = bench.size(256, 4), bench.data_size.workers
    tokenizer = vocabulary(source, min(len(source), bench.size(400, 8)))
    ways: dict[Decode, str] = {"device": "on the device", "full": "by the workers"}
    rows = []
    for way, where in ways.items():
        loader = make_loader(source, tokenizer, batch, workers, on_device=True, decode=way)
        row = Row(contender=f"medvl: loader, {workers} workers, decoded {where}", unit=UNIT)
        row.rate = rate_of(loader, bench.size(6.0, 0.1), bench.device)
        rows.append(row)
    on_device, by_workers = rows
    times = ratio(on_device.rate, by_workers.rate)
    return report(rows, {UNIT: on_device.rate, "times decoding by the workers": times})


def rate_of(loader: Loader, seconds: float, device: torch.device | None = None) -> float:
    """Return images per second over whole epochs, after a first one in which the workers start,
    with the work of a device that augments.
    """

    def epoch() -> int:
        images = 0
        for batch in loader:
            images += len(batch)
            if device is not None:
                augment_batch(batch.to(device, non_blocking=True))
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return images

    epoch()
    images, started = 0, time.perf_counter()
    while not images or time.perf_counter() - started < seconds:
        images += epoch()
    return images / (time.perf_counter() - started)


def measure_decoding(bench: Bench) -> Report:
    """Measure torchvision's `decode_jpeg` on lists of files in memory, by the host's clock, and
    simplejpeg.

    Raises SkipLine where torchvision cannot decode on this device.
    """
    source = ShardSource(bench.data())
    count = min(len(source), bench.size(FILES, 8))
    files = [source.image_bytes(position) for position in range(count)]
    decode = gpu_decoder(bench.device)
    encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    gpu = Row(contender=f"torchvision nvJPEG, {count} files at a time", unit=UNIT)
    gpu.rate = best_rate(lambda: decode(encoded), count, bench)
    cpu = Row(contender="simplejpeg, one core", unit=UNIT)
    cpu.rate = best_rate(lambda: [decode_grey(file) for file in files], count, bench)
    difference = grey_difference(decode(encoded)[0], decode_grey(files[0]))
    figures = {UNIT: gpu.rate, "times one core": ratio(gpu.rate, cpu.rate)}
    return report(
        [gpu, cpu], figures, f"mean difference from simplejpeg {difference:.2f} grey levels"
    )


def gpu_decoder(device: torch.device) -> Callable[[list[torch.Tensor]], Any]:
    """Return a function that decodes a list of files to grey images on a device. Raises SkipLine
    without one.
    """
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError as error:
        raise SkipLine(f"torchvision.io has no decode_jpeg: {error}") from error

    def decode(encoded: list[torch.Tensor]) -> Any:
        return decode_jpeg(encoded, mode=ImageReadMode.GRAY, device=device)

    try:
        decode([torch.frombuffer(bytearray(_sample()), dtype=torch.uint8)])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise SkipLine(
            f"torchvision cannot decode on {device}: {str(error).splitlines()[0]}"
        ) from error
    return decode


def best_rate(work: Callable[[], object], count: int, bench: Bench) -> float:
    """Return files per second at the best of several calls, each with its work on the device."""
    work()
    return count / min(seconds_of(work, bench.device) for _ in range(bench.size(10, 2)))


def decode_grey(file: bytes) -> np.ndarray:
    """Decode one file as the loader does."""
    return np.asarray(simplejpeg.decode_jpeg(file, colorspace="GRAY"))


def grey_difference(image_1HW: torch.Tensor, other_HW1: np.ndarray) -> float:
    """Return the mean absolute difference of two decoded images."""
    return float(np.abs(image_1HW.cpu().numpy()[0].astype(float) - other_HW1[:, :, 0]).mean())


def _sample() -> bytes:
    grey_HW1 = np.full((16, 16, 1), 128, np.uint8)
    return bytes(simplejpeg.encode_jpeg(grey_HW1, quality=95, colorspace="GRAY"))


LINES = (
    Line(
        name="loader-core",
        device="cpu",
        measures="loader on one core, 512 px JPEG files, the paper's augmentation to 224 pixels",
        unit="of the bare loop",
        rows=(
            TableRow(
                title="loader at 512 px, the paper's augmentation",
                peer="bare decoding and augmentation",
                ours="{least share:.2f} to {largest share:.2f} times",
            ),
            TableRow(
                title="loader at 512 px, area-averaging crops",
                ours="{least images/s:.0f} to {largest images/s:.0f} images/s and core",
            ),
        ),
        seconds=60,
        function=measure_on_one_core,
    ),
    Line(
        name="loader-reduced",
        device="cpu",
        measures="loader on one core that decodes JPEG files in full and at a reduced size",
        unit="of the bare loop",
        seconds=90,
        function=measure_reduced,
        optional=True,
    ),
    Line(
        name="loader",
        device="gpu",
        measures="loader with 16 workers, 512 px JPEG files, the paper's augmentation to 224 "
        "pixels",
        unit=UNIT,
        rows=(
            TableRow(
                title="`loader`: 512 px JPEG, 16 workers",
                target="5,800 images/s",
                peer="bare loop, one core: {rows[1].rate:,.0f} images/s",
                ours="{images/s:,.0f} images/s",
            ),
        ),
        seconds=25,
        function=measure_loader,
    ),
    Line(
        name="loader-device",
        device="gpu",
        measures="loader whose 512 px JPEG files are decoded and augmented on the GPU",
        unit=UNIT,
        rows=(
            TableRow(
                title="`loader-device`: 512 px JPEG, decoded on the GPU",
                target="12,000 images/s",
                peer="decoded by the workers: {rows[1].rate:,.0f} images/s",
                ours="{images/s:,.0f} images/s",
            ),
        ),
        seconds=30,
        function=measure_decoding_on_device,
    ),
    Line(
        name="nvjpeg",
        device="gpu",
        measures="decoding of 512 px JPEG files on the GPU by torchvision, host clock",
        unit=UNIT,
        rows=(
            TableRow(
                title="`nvjpeg`: decoding of 512 px JPEG by torchvision",
                peer="one core: {rows[1].rate:,.0f} images/s",
                ours="{images/s:,.0f} images/s",
            ),
        ),
        seconds=10,
        function=measure_decoding,
    ),
)
