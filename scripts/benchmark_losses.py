"""Benchmark of losses in blocks, and of a separable critic, against their plain form: time, memory
and differences.

    python scripts/benchmark_losses.py                                # 16,384 pairs of width 512, both losses
    python scripts/benchmark_losses.py --batch 65536 --device cuda --precision bf16
    python scripts/benchmark_losses.py --batch 32768 --forms blocks   # where the plain form does not fit
    python scripts/benchmark_losses.py --losses critic --batch 64 --dim 768   # pairs concatenated, or separable

Forward and backward with a learned scale, in float32 or under bf16 autocast (on a CPU it affects
the plain form only). The two forms alternate in one process; on a CPU, times are CPU seconds of
this process. Memory is the peak that a form adds to a process of its own that holds the embeddings
(CPU), or to the device.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmark_gloria import measure, peak_bytes
from torch import Tensor

from medvl import losses

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--losses", nargs="+", choices=[*FORMS], default=["info_nce", "sigmoid"])
    parser.add_argument(
        "--forms", nargs="+", choices=["plain", "blocks"], default=["plain", "blocks"]
    )
    parser.add_argument(
        "--memory-of", nargs=2, metavar=("LOSS", "FORM"), help="print the bytes that one pass adds"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    if options.memory_of:
        loss, form = options.memory_of
        function = in_precision(FORMS[loss][form], options.precision)
        print(json.dumps(added_bytes(function, options.batch, options.dim, options.device)))
        return
    for loss in options.losses:
        print(
            f"{loss}: {options.batch} pairs of {options.dim} numbers, {options.device}, "
            f"{options.precision}"
        )
        compare(loss, options)


def compare(loss: str, options: argparse.Namespace) -> None:
    """Print the best time and the memory of each form of a loss, and their differences."""
    leaves = inputs(options.batch, options.dim, options.device)
    seconds: dict[str, list[float]] = {form: [] for form in options.forms}
    results = {}
    for _ in range(options.repeats):
        for form in options.forms:
            seconds_spent, results[form] = measure(
                in_precision(FORMS[loss][form], options.precision), *leaves
            )
            seconds[form].append(seconds_spent)
    added = {}
    for form, times in seconds.items():
        sizes = [
            "--batch",
            str(options.batch),
            "--dim",
            str(options.dim),
            "--device",
            options.device,
        ]
        sizes += ["--precision", options.precision]
        command = [sys.executable, __file__, *sizes, "--memory-of", loss, form]
        added[form] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        listed = ", ".join(f"{seconds_spent:.3g}" for seconds_spent in times)
        print(
            f"  {form:8} {min(times):8.3g} s  (best of {listed})  {added[form] / 1e6:8.0f} MB added"
        )
    if len(results) < 2:
        return
    time_ratio = min(seconds["blocks"]) / min(seconds["plain"])
    print(f"  blocks / plain: time {time_ratio:.2f}, memory {added['blocks'] / added['plain']:.3f}")
    for name, plain, blocks in zip(
        ("value", "scale", "image", "text"), *results.values(), strict=True
    ):
        difference = (plain - blocks).abs().max() / plain.abs().max()
        kind = "value" if name == "value" else "gradient"
        print(f"  difference, {name:6} {difference.item():8.1e} of the largest {kind}")


def in_precision(form: Callable[..., Tensor], precision: str) -> Callable[..., Tensor]:
    """Return the form as a training run in this precision calls it."""
    if precision == "fp32":
        return form

    def function(*leaves: Tensor) -> Tensor:
        with torch.autocast(leaves[0].device.type, torch.bfloat16):
            return form(*leaves)

    return function


def inputs(batch: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a scale, and unit vectors that are correlated within pairs."""
    generator = torch.Generator().manual_seed(0)
    image_BE, noise_BE = (torch.randn(batch, dim, generator=generator) for _ in range(2))
    text_BE = image_BE + 2 * noise_BE
    units = [
        F.normalize(part_BE, dim=1).to(device).requires_grad_() for part_BE in (image_BE, text_BE)
    ]
    return torch.tensor(14.3, device=device, requires_grad=True), units[0], units[1]


def added_bytes(form: Form, batch: int, dim: int, device: str) -> int:
    """Return the bytes that a pass adds to the peak, including its gradients."""
    measure(form, *inputs(64, dim, device))  # initialise libraries and their buffers
    leaves = inputs(batch, dim, device)
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    else:
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes(device)
    measure(form, *leaves)
    return peak_bytes(device) - before


def plain_info_nce(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """Compute the loss as in the paper's pseudo-code."""
    logits_BB = scale * image_BE @ text_BE.T
    target_B = torch.arange(len(logits_BB), device=logits_BB.device)
    return (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2


def plain_sigmoid(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """Compute the loss as in the paper's pseudo-code."""
    logits_BB = scale * image_BE @ text_BE.T - 10
    sign_BB = 2 * torch.eye(len(logits_BB), device=logits_BB.device) - 1
    return -F.logsigmoid(sign_BB * logits_BB).sum() / len(logits_BB)


def critic_bound(scale: Tensor, image_BE: Tensor, text_BE: Tensor, *, separable: bool) -> Tensor:
    """Compute the InfoNCE bound of a critic of the published size, from all pairs'
    concatenations or without them.
    """
    torch.manual_seed(0)
    critic = losses.SeparableCritic(image_BE.shape[1], text_BE.shape[1]).to(image_BE.device)
    image_BE, batch = scale * image_BE, len(image_BE)
    if separable:
        scores_BB = critic(image_BE, text_BE)
    else:
        first_BBE, second_BBE = (
            image_BE[:, None].expand(-1, batch, -1),
            text_BE.expand(batch, -1, -1),
        )
        scores_BB = (
            critic.rest(critic.first(torch.cat([first_BBE, second_BBE], dim=2))).squeeze(2).float()
        )
    other_BB = ~torch.eye(batch, dtype=torch.bool, device=image_BE.device)
    return -losses.info_nce_bound(scores_BB.diagonal(), scores_BB, other_BB)


FORMS: dict[str, dict[str, Form]] = {
    "info_nce": {
        "plain": plain_info_nce,
        "blocks": lambda scale, image_BE, text_BE: losses.clip(image_BE, text_BE, scale),
    },
    "sigmoid": {
        "plain": plain_sigmoid,
        "blocks": lambda scale, image_BE, text_BE: losses.siglip(image_BE, text_BE, scale, -10.0),
    },
    "critic": {
        "plain": functools.partial(critic_bound, separable=False),
        "blocks": functools.partial(critic_bound, separable=True),
    },
}


if __name__ == "__main__":
    main()
