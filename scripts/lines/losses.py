"""Losses, forward and backward, beside their published forms: GLoRIA's local loss, InfoNCE, and the
pairwise sigmoid.

On a CPU, times are CPU seconds of this process, and memory is the peak that a form adds to a
process of its own that holds the embeddings. On a GPU, losses run in bf16 autocast.
"""

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report
from measure.timing import Contender, Run, measure_in_turns, repeat
from torch import Tensor

from medvl import losses

# Internal: contrast of the published loop's similarities.
from medvl.losses.local.gloria import gloria_contrast

Form = Callable[..., Tensor]
REGIONS, WORDS, DIM = 19 * 19, 97, 768
"""Sizes of GLoRIA's local loss."""


def compare_gloria(bench: Bench) -> Report:
    """Compare GLoRIA's local loss with the published loop over texts, in float32."""
    leaves = gloria_inputs(bench.size(48, 3), "cpu")
    forms = {"loop": loop_over_texts, "ours": both_directions}
    return report([], _compare(forms, leaves, bench.size(3, 1)))


def compare_in_blocks(bench: Bench, loss: str) -> Report:
    """Compare a loss in blocks with its plain form: seconds and added memory, in float32."""
    size, dim = bench.size((16_384, 512), (64, 8))
    figures = _compare(FORMS[loss], inputs(size, dim, "cpu"), bench.size(2, 1))
    for name in FORMS[loss]:
        figures[f"{name} MB"] = bench.apart(added_bytes, loss, name, size, dim) / 1e6
    return report([], figures)


def _compare(
    forms: Mapping[str, Form], leaves: tuple[Tensor, ...], repeats: int
) -> dict[str, float]:
    """Return the least seconds of each of two forms in turns, their ratio, and the largest
    difference of value and gradients, relative to the largest entry.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    results = {}
    for _ in range(repeats):
        for name, form in forms.items():
            spent, results[name] = measure(form, *leaves)
            seconds[name].append(spent)
    figures = {f"{name} s": min(times) for name, times in seconds.items()}
    (theirs, ours), (first, second) = figures.values(), results.values()
    differences = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(first, second, strict=True)
    ]
    return figures | {"times as fast": theirs / ours, "largest difference": max(differences)}


def gloria_inputs(batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random regions and words."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, REGIONS, DIM), (batch, WORDS, DIM)
    regions_BPE, words_BWE = (
        torch.randn(shape, generator=generator).mul_(0.2).to(device) for shape in shapes
    )
    return regions_BPE.requires_grad_(), words_BWE.requires_grad_()


def measure(form: Callable[..., Tensor], *leaves: Tensor) -> tuple[float, tuple[Tensor, ...]]:
    """Return the CPU seconds of a forward and backward pass, and the loss with its gradients."""
    start = time.process_time()
    value = form(*leaves)
    grads = torch.autograd.grad(value, leaves)
    return time.process_time() - start, (value.detach(), *grads)


def both_directions(regions_BPE: Tensor, words_BWE: Tensor) -> Tensor:
    """Compute medvl's loss in both directions."""
    mask_BW = torch.ones(words_BWE.shape[:2], dtype=torch.bool, device=words_BWE.device)
    image_to_text, text_to_image = losses.gloria_local(regions_BPE, words_BWE, mask_BW)
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


def added_bytes(loss: str, form: str, size: int, dim: int) -> int:
    """Return the bytes that a pass adds to the peak of this process, including its gradients."""
    torch.set_num_threads(1)
    measure(FORMS[loss][form], *inputs(64, dim, "cpu"))  # initialise libraries and their buffers
    leaves = inputs(size, dim, "cpu")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak_bytes()
    measure(FORMS[loss][form], *leaves)
    return peak_bytes() - before


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


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


def block_info_nce(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """Compute medvl's InfoNCE."""
    return losses.clip(image_BE, text_BE, scale)


def block_sigmoid(scale: Tensor, image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """Compute medvl's pairwise sigmoid loss."""
    return losses.siglip(image_BE, text_BE, scale, -10.0)


FORMS: dict[str, dict[str, Form]] = {
    "info_nce": {"plain": plain_info_nce, "ours": block_info_nce},
    "sigmoid": {"plain": plain_sigmoid, "ours": block_sigmoid},
}
"""Loss -> its plain form, and medvl's in blocks."""


def measure_gloria(bench: Bench) -> Report:
    """Measure the local loss on 97 words and 19 x 19 regions of 768 dimensions; the published
    loop at 48 pairs.
    """
    large, small = bench.size((256, 48), (3, 2))

    def contender(name: str, form: Callable[..., Tensor], size: int) -> Contender:
        leaves = functools.partial(gloria_inputs, size, str(bench.device))
        return Contender(
            name=f"{name}, B = {size}", build=functools.partial(steps, form, leaves), samples=size
        )

    rows = measure_in_turns(
        bench,
        (
            contender("medvl: gloria_local", both_directions, large),
            contender("medvl: gloria_local", both_directions, small),
            contender("published loop over texts", loop_over_texts, small),
        ),
    )
    return report(rows, {"ms": rows[0].ms, "GB": rows[0].gb})


def measure_info_nce(bench: Bench) -> Report:
    """Measure InfoNCE of 65,536 pairs of 512 numbers with a learned scale, in blocks and plain."""
    size, dim = bench.size((65_536, 512), (64, 8))

    leaves = functools.partial(inputs, size, dim, str(bench.device))
    rows = measure_in_turns(
        bench,
        [
            Contender(name=name, build=functools.partial(steps, form, leaves), samples=size)
            for name, form in (
                ("medvl: losses.clip, in blocks", block_info_nce),
                ("stock: all logits at once", plain_info_nce),
            )
        ],
    )
    return report(rows, {"ms": rows[0].ms, "GB": rows[0].gb})


def steps(form: Callable[..., Tensor], make_leaves: Callable[[], Any]) -> Run:
    """Return steps that compute a loss and its gradients."""
    leaves = make_leaves()
    function = in_precision(form, "bf16")

    def step(number: int) -> None:
        torch.autograd.grad(function(*leaves), leaves)

    return repeat(step)


LINES = (
    Line(
        name="gloria-cpu",
        device="cpu",
        measures="GLoRIA's local loss, 48 pairs, beside the published loop over texts",
        unit="s",
        rows=(
            TableRow(
                title="GLoRIA's local loss, 48 pairs",
                peer="loop over texts",
                ours="{ours s:.1f} s, {times as fast:.2f} times as fast",
            ),
        ),
        seconds=100,
        function=compare_gloria,
    ),
    Line(
        name="info-nce-cpu",
        device="cpu",
        measures="InfoNCE of 16,384 pairs, 512 dimensions, beside all logits at once",
        unit="s, MB",
        rows=(
            TableRow(
                title="InfoNCE, 16,384 pairs of 512",
                peer="plain form: {plain s:.1f} s, {plain MB:,.0f} MB",
                ours="{ours s:.1f} s, {ours MB:,.0f} MB",
            ),
        ),
        seconds=160,
        function=functools.partial(compare_in_blocks, loss="info_nce"),
    ),
    Line(
        name="sigmoid",
        device="cpu",
        measures="pairwise sigmoid loss of 16,384 pairs, 512 dimensions, beside all logits at once",
        unit="s, MB",
        rows=(
            TableRow(
                title="pairwise sigmoid, 16,384 pairs",
                peer="plain form: {plain s:.1f} s, {plain MB:,.0f} MB",
                ours="{ours s:.1f} s, {ours MB:,.0f} MB",
            ),
        ),
        seconds=120,
        function=functools.partial(compare_in_blocks, loss="sigmoid"),
    ),
    Line(
        name="gloria",
        device="gpu",
        measures="GLoRIA's local loss, B = 256, forward and backward",
        unit="ms, GB",
        rows=(
            TableRow(
                title="`gloria`: local loss, batch 256",
                target="300 ms, 5 GB",
                peer="loop over texts, batch 48: {rows[2].ms:,.0f} ms, {rows[2].gb:.0f} GB",
                ours="{ms:.0f} ms, {GB:.1f} GB; batch 48: {rows[1].ms:.0f} ms",
            ),
        ),
        seconds=55,
        function=measure_gloria,
    ),
    Line(
        name="info-nce",
        device="gpu",
        measures="InfoNCE of 65,536 pairs, 512 dimensions, forward and backward",
        unit="ms, GB",
        rows=(
            TableRow(
                title="`info-nce`: 65,536 pairs of 512",
                target="55 ms, 2 GB",
                peer="plain form: {rows[1].ms:.0f} ms, {rows[1].gb:.0f} GB",
                ours="{ms:.1f} ms, {GB:.1f} GB",
            ),
        ),
        seconds=25,
        function=measure_info_nce,
    ),
)
