"""Autoencoder of chest radiographs: the first stage of latent diffusion (Rombach et al., arXiv
2112.10752).

    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --short-side 512 \\
        --out shards/mimic-cxr-512
    torchrun --nproc-per-node 8 recipes/autoencoder_cxr.py
    torchrun recipes/autoencoder_cxr.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    medvl generate --checkpoint runs/autoencoder-cxr/best --data shards/mimic-cxr-512/test \\
        --reconstruct --out rebuilt

Needs `pip install medvl[generation]`. RoentGen leaves Stable Diffusion's autoencoder as it is,
because it reconstructs radiographs well; this recipe is for other sizes, or without those weights.
Its images are the best that a generator on its latents can show: the last command writes them, and
`medvl eval generation` measures what they lose.

Preset `paper`: Stable Diffusion 1's sizes and the learning rate of its release (4.5e-6 for each
image of a batch). The release also trains with a perceptual and an adversarial loss, which medvl
does not have.

Preset `tiny`: frontal views at 64 pixels, 8 x 8 x 8 latents. A linear probe that was trained on
real images has a mean AUROC of the five competition findings of 0.925 [0.905, 0.946] on
reconstructed test images, 0.946 [0.929, 0.963] on the originals.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform
from medvl.models import AutoencoderConfig, AutoencoderSizes
from medvl.train import (
    AutoencoderRecipe,
    Cosine,
    ImageDataConfig,
    OptimConfig,
    TrainConfig,
    autoencoder_run,
    launch,
)

paper = AutoencoderRecipe(
    model=AutoencoderConfig(),
    data=ImageDataConfig(
        train="shards/mimic-cxr-512/train",
        valid=Path("shards/mimic-cxr-512/validate"),
        views=("PA", "AP"),
        image=EvalTransform(size=512, fit="pad"),
        valid_batch=16,
    ),
    optim=OptimConfig(optimizer="adam", lr=4.5e-6 * 64, betas=(0.5, 0.9), clip_norm=1.0),
    train=TrainConfig(
        run_dir=Path("runs/autoencoder-cxr"),
        epochs=20,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        best_metric="loss/l1",
    ),
)
tiny = dataclasses.replace(
    paper,
    model=AutoencoderConfig(
        image_size=64,
        fit="crop",
        sizes=AutoencoderSizes(
            image_channels=1,
            channels=(8, 16, 32, 64),
            layers=1,
            latent_channels=8,
            groups=8,
            attention=False,
        ),
    ),
    data=ImageDataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        views=("PA", "AP"),
        image=EvalTransform(size=64, fit="crop"),
        workers=1,
        valid_batch=64,
    ),
    optim=OptimConfig(optimizer="adamw", lr=3e-3, clip_norm=1.0, schedule=Cosine(warmup_steps=20)),
    train=TrainConfig(
        run_dir=Path("quickstart/autoencoder"),
        epochs=6,
        global_batch=32,
        precision="bf16",
        best_metric="loss/l1",
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --short-side 512 --out "
    "shards/mimic-cxr-512"
)
prepare = autoencoder_run("autoencoder_cxr", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "Autoencoder of chest radiographs.")
