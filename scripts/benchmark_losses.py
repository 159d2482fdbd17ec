"""Contrastive losses in blocks against their plain form: time, memory, and how far they are apart.

    python scripts/benchmark_losses.py                                # 16,384 pairs of 512 numbers, both losses
    python scripts/benchmark_losses.py --batch 65536 --device cuda --precision bf16
    python scripts/benchmark_losses.py --batch 32768 --forms blocks   # where the plain form does not fit

Forward and backward, with a learned scale; in float32, or as in a run of bf16 on a GPU: operands of products in
bfloat16 (on a CPU, of the plain form only). Times are of the two forms in turn, in one process; on a CPU they
are that process's own, so another one beside it changes them less than it changes the clock. Memory is what a form adds
to a process of its own that holds the embeddings (on a CPU), or to the device.
"""

import argparse
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
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--losses", nargs="+", choices=["info_nce", "sigmoid"], default=["info_nce", "sigmoid"])
    parser.add_argument("--forms", nargs="+", choices=["plain", "blocks"], default=["plain", "blocks"])
    parser.add_argument("--memory-of", nargs=2, metavar=("LOSS", "FORM"), help="print the bytes that one pass adds")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for a busy core would be what is measured
    if options.memory_of:
        loss, form = options.memory_of
        called = in_precision(FORMS[loss][form], options.precision)
        print(json.dumps(added_bytes(called, options.batch, options.dim, options.device)))
        return
    for loss in options.losses:
        print(f"{loss}: {options.batch} pairs of {options.dim} numbers, {options.device}, {options.precision}")
        compare(loss, options)


def compare(loss: str, options: argparse.Namespace) -> None:
    """One loss in its forms: the best time of each, the memory of each, and how far they are apart."""
    leaves = inputs(options.batch, options.dim, options.device)
    seconds: dict[str, list[float]] = {form: [] for form in options.forms}
    found = {}
    for _ in range(options.repeats):
        for form in options.forms:
            spent, found[form] = measure(in_precision(FORMS[loss][form], options.precision), *leaves)
            seconds[form].append(spent)
    added = {}
    for form, times in seconds.items():
        sizes = ["--batch", str(options.batch), "--dim", str(options.dim), "--device", options.device]
        sizes += ["--precision", options.precision]
        command = [sys.executable, __file__, *sizes, "--memory-of", loss, form]
        added[form] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        listed = ", ".join(f"{spent:.3g}" for spent in times)
        print(f"  {form:8} {min(times):8.3g} s  (best of {listed})  {added[form] / 1e6:8.0f} MB added")
    if len(found) < 2:
        return
    time_ratio = min(seconds["blocks"]) / min(seconds["plain"])
    print(f"  blocks / plain: time {time_ratio:.2f}, memory {added['blocks'] / added['plain']:.3f}")
    for name, plain, blocks in zip(("value", "scale", "image", "text"), *found.values(), strict=True):
        apart = (plain - blocks).abs().max() / plain.abs().max()
        print(f"  apart, {name:6} {apart.item():8.1e} of the largest {'gradient' if name != 'value' else 'value'}")


def in_precision(form: Form, precision: str) -> Form:
    """The form as a run in that precision calls it."""
    if precision == "fp32":
        return form

    def called(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
        with torch.autocast(scale.device.type, torch.bfloat16):
            return form(scale, image_BE, text_BE)

    return called


def inputs(batch: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A scale, and unit vectors of which those of a pair are somewhat alike."""
    generator = torch.Generator().manual_seed(0)
    image_BE, noise_BE = (torch.randn(batch, dim, generator=generator) for _ in range(2))
    text_BE = image_BE + 2 * noise_BE
    units = [F.normalize(part_BE, dim=1).to(device).requires_grad_() for part_BE in (image_BE, text_BE)]
    return torch.tensor(14.3, device=device, requires_grad=True), units[0], units[1]


def added_bytes(form: Form, batch: int, dim: int, device: str) -> int:
    """What the pass adds to the peak, the gradients that it returns included."""
    measure(form, *inputs(64, dim, device))  # libraries and their buffers
    leaves = inputs(batch, dim, device)
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    else:
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes(device)
    measure(form, *leaves)
    return peak_bytes(device) - before


def plain_info_nce(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """As the paper's pseudo-code has it."""
    logits_BB = scale * image_BE @ text_BE.T
    target_B = torch.arange(len(logits_BB), device=logits_BB.device)
    return (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2


def plain_sigmoid(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """As the paper's pseudo-code has it."""
    logits_BB = scale * image_BE @ text_BE.T - 10
    sign_BB = 2 * torch.eye(len(logits_BB), device=logits_BB.device) - 1
    return -F.logsigmoid(sign_BB * logits_BB).sum() / len(logits_BB)


FORMS: dict[str, dict[str, Form]] = {
    "info_nce": {
        "plain": plain_info_nce,
        "blocks": lambda scale, image_BE, text_BE: losses.clip(image_BE, text_BE, scale),
    },
    "sigmoid": {
        "plain": plain_sigmoid,
        "blocks": lambda scale, image_BE, text_BE: losses.siglip(image_BE, text_BE, scale, -10.0),
    },
}


if __name__ == "__main__":
    main()
