"""Cost of latent diffusion: parameters, memory and FLOPs of training and sampling, and images a
second.

    python scripts/benchmark_images.py  # counts only, on the meta device
    python scripts/benchmark_images.py --size tiny --seconds --batch 32
    python scripts/benchmark_images.py --seconds --device cuda --precision bf16 --batch 8

FLOPs are counted by torch for one image, a multiplication and an addition as two. A training step
encodes the image and its text, and runs the U-Net forward and backward; with cached latents the
autoencoder is left out. A sampled image is 25 evaluations of the U-Net at guidance 1, twice as many
above, and one decoding. Memory is that of weights, gradients and the two moments of AdamW in
float32, without activations.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from medvl.models import (
    AutoencoderSizes,
    LatentDiffusion,
    LatentDiffusionConfig,
    RoentGen,
    RoentGenConfig,
    UNetSizes,
)

STEPS = 25
SIZES: dict[str, LatentDiffusionConfig] = {
    "paper": RoentGenConfig(),
    "tiny": LatentDiffusionConfig(
        image_size=64,
        fit="crop",
        latent_scale=1.0,
        autoencoder=AutoencoderSizes(
            image_channels=1,
            channels=(8, 16, 32, 64),
            layers=1,
            latent_channels=8,
            groups=8,
            attention=False,
        ),
        unet=UNetSizes(
            channels=(64, 128),
            cross_attention=(True, True),
            layers=1,
            heads=4,
            text_width=192,
            groups=16,
        ),
        text_encoder="tiny_bert",
        max_tokens=32,
        target="v",
    ),
}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--seconds", action="store_true", help="measure time as well")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads would wait for cores that are busy
    config: Any = SIZES[options.size]
    system: Any = RoentGen if isinstance(config, RoentGenConfig) else LatentDiffusion
    with torch.device("meta"):
        print_counts(system.build(config, pretrained=False, tokenizer=None))
    if options.seconds:
        model = system.build(config, pretrained=False, tokenizer=None).to(options.device)
        print_seconds(model, options.batch, options.repeats, options.precision == "bf16")


def inputs(model: LatentDiffusion, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Return random inputs of the parts of a model."""
    config = model.config
    size = config.image_size // config.autoencoder.reduction
    return {
        "image": torch.zeros(
            batch,
            config.autoencoder.image_channels,
            config.image_size,
            config.image_size,
            device=device,
        ),
        "latent": torch.zeros(batch, config.autoencoder.latent_channels, size, size, device=device),
        "step": torch.zeros(batch, dtype=torch.int64, device=device),
        "ids": torch.ones(batch, config.max_tokens, dtype=torch.int64, device=device),
        "mask": torch.ones(batch, config.max_tokens, dtype=torch.bool, device=device),
    }


def calls(
    model: LatentDiffusion, values: dict[str, torch.Tensor]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the forward pass of each part by name."""
    states = torch.zeros(
        *values["ids"].shape, model.text_encoder.token_dim, device=values["ids"].device
    )
    return {
        "autoencoder, encode": lambda: model.autoencoder.encode(values["image"]).latent_dist.mean,
        "autoencoder, decode": lambda: model.autoencoder.decode(values["latent"]).sample,
        "text encoder": lambda: model.text_encoder(values["ids"], values["mask"]).tokens_BTD,
        "U-Net": lambda: model.predict(values["latent"], values["step"], states, values["mask"]),
    }


def print_counts(model: LatentDiffusion) -> None:
    """Print parameters, memory and FLOPs."""
    flops = {}
    for name, call in calls(model, inputs(model, 1, "meta")).items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        flops[name] = counter.get_total_flops() / 1e9
    parts = {
        "U-Net": model.unet,
        "text encoder": model.text_encoder,
        "autoencoder": model.autoencoder,
    }
    for name, part in parts.items():
        print(f"{name:22} {sum(each.numel() for each in part.parameters()):14,} parameters")
    for name, count in flops.items():
        print(f"{name:22} {count:14.2f} GFLOPs an image, forward")
    text = flops["text encoder"] * (3 if model.config.train_text else 1)
    step = 3 * flops["U-Net"]
    print(f"{'training':22} {step + text + flops['autoencoder, encode']:14.2f} GFLOPs an image")
    print(
        f"{'... cached latents':22} {step + (text if model.config.train_text else 0.0):14.2f} "
        f"GFLOPs an image"
    )
    for guidance, times in (("guidance 1", 1), ("guidance above 1", 2)):
        total = (
            STEPS * times * flops["U-Net"]
            + flops["autoencoder, decode"]
            + times * flops["text encoder"]
        )
        print(f"{'sampling, ' + guidance:28} {total:8.2f} GFLOPs an image, {STEPS} steps")
    weights = sum(each.numel() for each in model.parameters()) * 4 / 2**30
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad) * 4 / 2**30
    print(
        f"{'memory':22} {weights:.2f} GiB weights; {weights + 3 * trained:.2f} GiB with "
        f"gradients and AdamW's moments"
    )


def print_seconds(model: LatentDiffusion, batch: int, repeats: int, half: bool) -> None:
    """Print images a second of training steps on latents and of sampling."""
    values = inputs(model, batch, str(model.device))
    parts = calls(model, values)
    optimizer = torch.optim.AdamW(list(model.unet.parameters()), lr=1e-4)
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=half)

    def train_step() -> None:
        with autocast:
            loss = parts["U-Net"]().float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample_step() -> None:
        with autocast, torch.no_grad():
            parts["U-Net"]()

    model.train()
    training = batch / _seconds(train_step, repeats, model.device)
    model.eval()
    with torch.no_grad():
        one = _seconds(sample_step, repeats, model.device) / batch
        decoding = _seconds(parts["autoencoder, decode"], repeats, model.device) / batch
    print(f"{'training on latents':22} {training:14.2f} images a second")
    for guidance, times in (("guidance 1", 1), ("guidance above 1", 2)):
        print(
            f"{'sampling, ' + guidance:28} {1 / (STEPS * times * one + decoding):8.3f} images a "
            f"second, {STEPS} steps"
        )


def _seconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Return the shortest time of a call, after a first one."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


if __name__ == "__main__":
    main()
