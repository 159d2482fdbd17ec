"""The training step against a bare loop over the same model: pairs a second, peak memory, share of the peak FLOPs.

    python scripts/benchmark_train.py                                            # tiny encoders, a CPU
    python scripts/benchmark_train.py --preset paper --batch 32 256 --precision bf16 --peak-tflops 989   # a GPU

The floor is forward, backward and the optimiser's update without anything around them. The medvl step adds moving the
batch to the device, seeding from (step, rank), the finite check before the update and the gradient norm. Loading is not
in it: `scripts/benchmark_loader.py` measures that.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from medvl.models import ConVIRTConfig, create_model
from medvl.schema import FINDINGS, Batch
from medvl.train.config import OptimConfig
from medvl.train.distributed import World, join
from medvl.train.optim import build_optimizer
from medvl.train.precision import Precision
from medvl.train.step import Step

CONFIGS = {
    "tiny": ConVIRTConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        projection_dim=128,
        frozen_text_layers=0,
        vocab_size=4000,
    ),
    "paper": ConVIRTConfig(),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=CONFIGS, default="tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="pairs of a step; several are measured each")
    parser.add_argument("--tokens", type=int, default=32, help="length of every text")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="of the device at this precision: prints the share reached")
    options = parser.parse_args()
    with join("auto") as world:
        print(f"ConVIRT {options.preset}, {options.precision}, {options.tokens} tokens, {world.device}")
        for pairs in options.batch:
            measure(pairs, options, world)


def measure(pairs: int, options: argparse.Namespace, world: World) -> None:
    """Both loops at one batch size."""
    device = world.device
    torch.manual_seed(0)
    model = create_model(CONFIGS[options.preset]).to(device).train()
    if options.channels_last:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    if options.compile:
        model.compile()
    config = OptimConfig(lr=1e-5, clip_norm=1.0)
    optimizer, precision = build_optimizer(model, config), Precision(options.precision, device)
    step = Step(model, optimizer, precision, world, seed=0, clip_norm=1.0, channels_last=options.channels_last)
    batch = random_batch(pairs, options.tokens, model.config)
    placed = step.place(batch)

    def bare(_: int) -> None:
        with precision.autocast():
            loss = model(placed).total
        precision.backward(loss)
        precision.update(optimizer)
        optimizer.zero_grad(set_to_none=True)

    with FlopCounterMode(display=False) as counter:
        bare(0)
    tflop = counter.get_total_flops() / 1e12
    rates = {
        "bare loop": pairs / seconds_each(bare, options.steps, device),
        "medvl step": pairs / seconds_each(lambda number: step(number, 1e-5, [batch], 1), options.steps, device),
    }
    for name, rate in rates.items():
        peak = f", {tflop * rate / pairs / options.peak_tflops:.2f} of peak" if options.peak_tflops else ""
        print(f"{pairs:5d} pairs  {name:10s} {rate:8.1f} pairs/s, {1000 * pairs / rate:7.1f} ms a step{peak}")
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if device.type == "cuda" else ""
    share = rates["medvl step"] / rates["bare loop"]
    print(f"{pairs:5d} pairs  the medvl step reaches {share:.2f} of the bare loop; {tflop:.3f} TFLOP a step{memory}")


def random_batch(pairs: int, tokens: int, config: ConVIRTConfig) -> Batch:
    """Noise in the form of a batch."""
    generator = torch.Generator().manual_seed(0)
    size, vocabulary = config.image_size, config.vocab_size or 20_000
    return Batch(
        keys=[str(index) for index in range(pairs)],
        image_BCHW=torch.randint(0, 256, (pairs, 1, size, size), dtype=torch.uint8, generator=generator),
        ids_BT=torch.randint(5, vocabulary, (pairs, tokens), generator=generator),
        mask_BT=torch.ones(pairs, tokens, dtype=torch.bool),
        labels_BL=torch.full((pairs, len(FINDINGS)), float("nan")),
        texts=[""] * pairs,
    )


def seconds_each(function: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Mean time of a call, after three that do not count."""
    for number in range(3):
        function(number)
    synchronize(device)
    started = time.perf_counter()
    for number in range(steps):
        function(number)
    synchronize(device)
    return (time.perf_counter() - started) / steps


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
