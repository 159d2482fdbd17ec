"""Benchmark of word-patch alignment by optimal transport: the batch at once against one sample
after another.

    python scripts/benchmark_alignment.py  # 32 pairs, 40 words, 144 patches, as in ViLT
    python scripts/benchmark_alignment.py --device cuda --batch 256

Forward and backward; both forms are `medvl.losses.word_patch_alignment` and give the same
distances. Texts have 5 to `--words` words.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from medvl import losses


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--patches", type=int, default=144)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    generator = torch.Generator().manual_seed(0)
    sizes = (options.words, options.patches)
    leaves = [
        torch.randn(options.batch, size, options.width, generator=generator) for size in sizes
    ]
    length_B = torch.randint(5, options.words + 1, (options.batch,), generator=generator)
    pads = [
        torch.arange(options.words) >= length_B[:, None],
        torch.zeros(options.batch, options.patches).bool(),
    ]
    inputs = [tensor.to(options.device) for tensor in (*leaves, *pads)]
    print(
        f"{options.batch} pairs, {options.words} words, {options.patches} patches, {options.device}"
    )
    distances = {}
    for name, form in (("one sample after another", one_by_one), ("the batch at once", at_once)):
        seconds, distances[name] = best(form, inputs, options.repeats)
        print(f"  {name:26}{1000 * seconds:9.1f} ms")
    first, second = distances.values()
    print(f"  largest difference of a distance {(first - second).abs().max().item():.1e}")


def at_once(inputs: list[Tensor]) -> Tensor:
    """(B,): distances."""
    text_BME, image_BNE, text_pad_BM, image_pad_BN = inputs
    distance_B, _ = losses.word_patch_alignment(text_BME, image_BNE, text_pad_BM, image_pad_BN)
    return distance_B


def one_by_one(inputs: list[Tensor]) -> Tensor:
    """(B,): distances, from batches of one."""
    rows = range(len(inputs[0]))
    return torch.cat([at_once([tensor[row : row + 1] for tensor in inputs]) for row in rows])


def best(
    form: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], repeats: int
) -> tuple[float, Tensor]:
    """Return the least seconds of a forward and backward pass, and the distances."""
    text_BME, image_BNE, *pads = inputs
    on_device = text_BME.is_cuda
    seconds = []
    for _ in range(repeats):
        leaves = [text_BME.clone().requires_grad_(), image_BNE.clone().requires_grad_()]
        if on_device:
            torch.cuda.synchronize()
        began = time.perf_counter()
        distance_B = form([*leaves, *pads])
        distance_B.sum().backward()
        if on_device:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds), distance_B.detach()


if __name__ == "__main__":
    main()
