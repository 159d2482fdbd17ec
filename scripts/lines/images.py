"""Latent diffusion: the operations and the memory of a training step at RoentGen's size.

FLOPs are counted by torch for one image, a multiplication and an addition as two. A training step
encodes the image and its text, and runs the U-Net forward and backward; with cached latents the
autoencoder is left out. A sampled image is 25 evaluations of the U-Net at guidance 1, and one
decoding. Memory is that of weights, gradients and the two moments of AdamW in float32, without
activations.
"""

from collections.abc import Callable

import torch
from measure.bench import Bench
from measure.line import Line, Report, report
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


def count_roentgen(bench: Bench) -> Report:
    """Count the operations and the memory of RoentGen."""
    config = SIZES[bench.size("paper", "tiny")]
    system = RoentGen if isinstance(config, RoentGenConfig) else LatentDiffusion
    with torch.device("meta"):
        model = system.build(config, pretrained=False, tokenizer=None)
        parts = calls(model, inputs(model, 1, "meta"))
    gflop = {}
    for name, call in parts.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        gflop[name] = counter.get_total_flops() / 1e9
    text = gflop["text encoder"] * (3 if config.train_text else 1)
    cached = 3 * gflop["U-Net"] + (text if config.train_text else 0.0)
    every, trained = (
        sum(each.numel() for each in model.parameters() if each.requires_grad or not only)
        for only in (False, True)
    )
    figures = {
        "GFLOP a step": 3 * gflop["U-Net"] + text + gflop["autoencoder, encode"],
        "GFLOP a step with cached latents": cached,
        "GFLOP a sampled image": STEPS * gflop["U-Net"]
        + gflop["autoencoder, decode"]
        + gflop["text encoder"],
        "GiB": (every + 3 * trained) * 4 / 2**30,
    }
    return report([], figures)


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


LINES = (
    Line(
        name="roentgen",
        device="cpu",
        measures="RoentGen at 512 px: operations and memory of a training step",
        unit="GFLOP, GiB",
        seconds=30,
        function=count_roentgen,
    ),
)
