"""Benchmark of GLoRIA's local loss against the published loop over texts: time, and memory at a
large batch.

    python scripts/benchmark_gloria.py                       # 48 pairs: both forms, alternating
    python scripts/benchmark_gloria.py --batch 256 --memory  # medvl's form only, in a process of its own: peak memory
    python scripts/benchmark_gloria.py --device cuda --tf32  # as in a run in 16 bits

Forward and backward in float32 with 97 words per text, 19 x 19 regions and 768 dimensions. Loss and
gradients of both forms are compared. CPU times are CPU seconds of this process, to reduce the
influence of other load.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses import gloria_local
from medvl.losses.local.gloria import (
    gloria_contrast,
)  # internal: contrast of the published loop's similarities

REGIONS, WORDS, DIM = 19 * 19, 97, 768


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="use TensorFloat32 on a GPU")
    parser.add_argument(
        "--memory", action="store_true", help="peak memory of one pass of medvl's form"
    )
    parser.add_argument(
        "--once", action="store_true", help="time and memory of one pass of medvl's form"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    if options.memory and options.device == "cpu":
        command = [sys.executable, __file__, "--once", "--batch", str(options.batch)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    elif options.memory or options.once:
        run_once(options.batch, options.device)
    else:
        compare(options.batch, options.repeats, options.device)


def compare(batch: int, repeats: int, device: str) -> None:
    """Print the best time of each form and their differences."""
    regions_BPE, words_BWE = inputs(batch, device)
    seconds: dict[str, list[float]] = {"loop over texts": [], "gloria_local": []}
    forms = {"loop over texts": loop_over_texts, "gloria_local": both_directions}
    results = {}
    for _ in range(repeats):
        for name, form in forms.items():
            seconds_spent, results[name] = measure(form, regions_BPE, words_BWE)
            seconds[name].append(seconds_spent)
    for name, times in seconds.items():
        print(
            f"{name:16} {min(times):8.3f} s  (best of "
            f"{', '.join(f'{seconds_spent:.2f}' for seconds_spent in times)})"
        )
    print(f"{'ratio':16} {min(seconds['loop over texts']) / min(seconds['gloria_local']):8.2f}")
    for name, loop, ours in zip(("loss", "regions", "words"), *results.values(), strict=True):
        difference = (loop - ours).abs().max() / loop.abs().max()
        kind = "value" if name == "loss" else "gradient"
        print(f"{'difference, ' + name:16} {difference.item():8.1e}  (of the largest {kind})")


def run_once(batch: int, device: str) -> None:
    """Print the time of one pass and the peak memory of the process or the device."""
    before = peak_bytes(device)
    seconds_spent, _ = measure(both_directions, *inputs(batch, device))
    print(
        f"{batch} pairs: {seconds_spent:.1f} s, peak {peak_bytes(device) / 1e9:.2f} GB, "
        f"{before / 1e9:.2f} GB before"
    )


def inputs(batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random regions and words."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, REGIONS, DIM), (batch, WORDS, DIM)
    regions_BPE, words_BWE = (
        torch.randn(shape, generator=generator).mul_(0.2).to(device) for shape in shapes
    )
    return regions_BPE.requires_grad_(), words_BWE.requires_grad_()


def measure(form: Callable[..., Tensor], *leaves: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    """Return the seconds of a forward and backward pass, and the loss with its gradients."""
    on_cpu = leaves[0].device.type == "cpu"
    clock = time.process_time if on_cpu else _device_clock
    start = clock()
    value = form(*leaves)
    grads = torch.autograd.grad(value, leaves)
    return clock() - start, (value.detach(), *grads)


def both_directions(regions_BPE: Tensor, words_BWE: Tensor) -> Tensor:
    """Compute medvl's loss in both directions."""
    mask_BW = torch.ones(words_BWE.shape[:2], dtype=torch.bool, device=words_BWE.device)
    image_to_text, text_to_image = gloria_local(regions_BPE, words_BWE, mask_BW)
    return image_to_text + text_to_image


def loop_over_texts(regions_BPE: Tensor, words_BWE: Tensor) -> Tensor:
    """Compute the loss as published, with a loop over texts that repeats each for all images."""
    batch, regions, dim = regions_BPE.shape
    columns = []
    for words_WE in words_BWE:
        count = len(words_WE)
        words_BEW = words_WE.T[None].repeat(batch, 1, 1)
        shares_BPW = torch.bmm(regions_BPE, words_BEW).view(batch * regions, count).softmax(dim=1)
        shares_BWP = shares_BPW.view(batch, regions, count).transpose(1, 2).contiguous()
        attention_BWP = (
            (4.0 * shares_BWP.view(batch * count, regions))
            .softmax(dim=1)
            .view(batch, count, regions)
        )
        context_BEW = torch.bmm(
            regions_BPE.transpose(1, 2), attention_BWP.transpose(1, 2).contiguous()
        )
        context_QE = context_BEW.transpose(1, 2).contiguous().view(batch * count, dim)
        words_QE = words_BEW.transpose(1, 2).contiguous().view(batch * count, dim)
        columns.append(
            (5.0 * F.cosine_similarity(context_QE, words_QE))
            .view(batch, count)
            .exp()
            .sum(dim=1)
            .log()
        )
    included_B = torch.ones(batch, dtype=torch.bool, device=regions_BPE.device)
    image_to_text, text_to_image = gloria_contrast(torch.stack(columns, dim=1), included_B)
    return image_to_text + text_to_image


def peak_bytes(device: str) -> int:
    """Return the peak memory of this process or of the device in bytes."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def _device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
