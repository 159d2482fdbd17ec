"""The loader alone, and decoding of JPEG files on the GPU beside it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
import torch
from benchmark_loader import bare_seconds, make_loader

from gpu_lines.bench import Bench
from gpu_lines.line import Goal, Line, Report, Row, SkipLine, ratio, report
from medvl.data import Loader, ShardSource, train_wordpiece
from medvl.train.doctor.examine import seconds_of  # internal, as in `gpu_lines.timing`

BATCH, FILES = 64, 192
UNIT = "images/s"


def measure_loader(bench: Bench) -> Report:
    """Measure the loader with the paper's augmentation, and decoding and augmentation alone on
    one core.
    """
    source = ShardSource(bench.data())
    batch, workers = bench.size(BATCH, 4), bench.data_size.workers
    count = min(len(source), bench.size(400, 8))
    texts = (text for place in range(count) for text in source.sample(place).sections.values())
    loader = make_loader(source, train_wordpiece(texts), batch, workers)
    ours = Row(contender=f"medvl: loader, {workers} workers", unit=UNIT)
    ours.rate = rate_of(loader, bench.size(6.0, 0.1))
    bare = Row(contender="decoding and augmentation alone, one core", unit=UNIT)
    bare.rate = count / bare_seconds(source, range(count), time.perf_counter)
    share = ratio(ours.rate, bare.rate * workers)
    return report([ours, bare], {UNIT: ours.rate, "of one core's rate times the workers": share})


def rate_of(loader: Loader, seconds: float) -> float:
    """Return images per second over whole epochs, after a first one in which the workers start."""
    for _ in loader:
        pass
    images, started = 0, time.perf_counter()
    while not images or time.perf_counter() - started < seconds:
        images += sum(len(batch) for batch in loader)
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


LINES = {
    "loader": Line(
        name="loader",
        measures="loader with 16 workers, 512 px JPEG files, the paper's augmentation to 224 "
        "pixels",
        goals=(Goal(figure=UNIT, value=5800),),
        stock="5,764 to 5,864 images/s with 16 workers (bare loops)",
        seconds=25,
        function=measure_loader,
    ),
    "nvjpeg": Line(
        name="nvjpeg",
        measures="decoding of 512 px JPEG files on the GPU by torchvision, host clock",
        stock="25,500 images/s by events, not confirmed by a host clock; simplejpeg 844 on one "
        "core",
        seconds=10,
        function=measure_decoding,
    ),
}
