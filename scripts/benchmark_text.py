"""Benchmark of a text encoder's training step on reports of different lengths: padded and packed.

    python scripts/benchmark_text.py                                          # a small BERT on the CPU
    python scripts/benchmark_text.py --device cuda --size base --batch 256    # in bf16, also with compiled layers

Forward and backward. Lengths follow a normal distribution of 70 +- 30 tokens, clipped to 8 to 128, and are padded to
the longest text of a batch. Attention dropout is 0, so that a GPU can use its variable-length kernel. CPU times are CPU
seconds of this process, to reduce the influence of other load.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medvl.encoders import TextEncoder, create_text_encoder

SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "base": {},
}
MAX_LENGTH, MIN_LENGTH, MEAN_LENGTH, LENGTH_STD = 128, 8, 70.0, 30.0
VOCABULARY = 28_996


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each form")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    device = torch.device(options.device)
    batches = [inputs(options.batch, device, seed) for seed in range(options.steps)]
    real = sum(int(mask_BT.sum()) for _, mask_BT in batches)
    share = real / sum(mask_BT.numel() for _, mask_BT in batches)
    print(f"{options.size}, batches of {options.batch}, {share:.0%} of the tokens real")
    seconds: dict[str, float] = {}
    for name, packed, compiled in list_forms(device):
        encoder = make_encoder(options.size, device, packed, compiled)
        run = make_step(encoder, device)
        run_all(run, batches if compiled else batches[:1])  # compilation for new lengths is not timed
        seconds[name] = measure(functools.partial(run_all, run, batches), device)
        rate, ratio = real / seconds[name], seconds["padded"] / seconds[name]
        print(f"{name:16} {rate:12,.0f} real tokens/s  {ratio:5.2f} of padded")


def run_all(run: Callable[[Tensor, Tensor], None], batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Run one step on each batch."""
    for batch in batches:
        run(*batch)


def list_forms(device: torch.device) -> list[tuple[str, bool, bool]]:
    """Return (name, packed, compiled) of the compared forms."""
    plain = [("padded", False, False), ("packed", True, False)]
    return (
        plain if device.type == "cpu" else [*plain, ("padded compiled", False, True), ("packed compiled", True, True)]
    )


def make_encoder(size: str, device: torch.device, packed: bool, compiled: bool) -> TextEncoder:
    """Return a BERT with random weights in train mode; layers are compiled one by one, for any length."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES[size], "attention_probs_dropout_prob": 0.0}
    encoder = create_text_encoder("bert", vocab_size=VOCABULARY, pool="mean", **sizes).to(device).train()
    encoder.pack(packed)
    if compiled:
        backbone: Any = encoder.backbone
        for layer in backbone.encoder.layer:
            layer.compile(dynamic=True)
    return encoder


def inputs(batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask."""
    generator = torch.Generator().manual_seed(seed)
    length_B = (
        (MEAN_LENGTH + LENGTH_STD * torch.randn(batch, generator=generator))
        .round()
        .clamp(MIN_LENGTH, MAX_LENGTH)
        .long()
    )
    longest = int(length_B.max())
    ids_BT = torch.randint(5, VOCABULARY, (batch, longest), generator=generator)
    return ids_BT.to(device), (torch.arange(longest) < length_B[:, None]).to(device)


def make_step(encoder: TextEncoder, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs a forward and backward pass, on a GPU in bf16."""

    def run(ids_BT: Tensor, mask_BT: Tensor) -> None:
        encoder.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            features = encoder(ids_BT, mask_BT)
        features.pooled_BD.float().square().mean().backward()

    return run


def measure(work: Callable[[], None], device: torch.device) -> float:
    """Return wall-clock seconds on a GPU, CPU seconds of this process on a CPU."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
