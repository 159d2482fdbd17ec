"""RoentGen on MIMIC-CXR: radiographs from impressions (Chambon et al., arXiv 2211.12737, Nature BME
2024).

    medvl shards mimic-cxr --root MIMIC-CXR --views PA --short-side 512 --out shards/mimic-cxr-pa
    # a local folder of diffusers
    medvl import stable_diffusion stable-diffusion-v1-4 --out checkpoints/sd-1-4
    torchrun --nproc-per-node 32 recipes/roentgen_mimic.py
    # after convirt_mimic.py tiny and autoencoder_cxr.py tiny
    torchrun recipes/roentgen_mimic.py tiny
    medvl generate --checkpoint runs/roentgen-mimic/last --data shards/mimic-cxr-pa/test \\
        --out generated --guidance 4

Needs `pip install medvl[generation]`. Synthetic images are not for clinical use; weights trained on
credentialed data stay credentialed.

Preset `paper`: U-Net and CLIP's text encoder trained together from Stable Diffusion 1.4, PA views,
512 pixels, batch 256, learning rate 5e-5, 60,000 steps, bf16. Sections "impression"; texts beyond
CLIP's 77 tokens are cut. The paper does not mention caption dropout; this preset drops 10 % of the
texts (`medvl.models.RoentGenConfig` says why), and `--model.caption-dropout 0` does not. Its other
variants:
    unet-only     CLIP frozen
    domain-text   RadBERT, frozen, with its own mask
    from-scratch  U-Net from random weights; autoencoder and CLIP of Stable Diffusion, CLIP trained
                  as in `paper`
An autoencoder of your own (`--autoencoder runs/autoencoder-cxr/best`) brings its own scale of the
latents, which is measured on training images. Start its U-Net anew: `from-scratch --autoencoder
...`.

Preset `tiny`: v-prediction with 4.4 million parameters on the phantom's frontal views at 64 pixels,
with the frozen text encoder of the quickstart's ConVIRT. Latents and text states are computed once.
Images of 256 test impressions have a mean AUROC of the five competition findings of 0.896 [0.874,
0.918] at guidance 5, which validation prompts chose from 5, 3 and 1; real images have 0.946, images
after the autoencoder 0.925, and shuffled prompts 0.496.
"""

import dataclasses
from pathlib import Path

from medvl.models import AutoencoderSizes, LatentDiffusionConfig, RoentGenConfig, UNetSizes
from medvl.train import (
    Constant,
    Cosine,
    GenerationDataConfig,
    GenerationRecipe,
    OptimConfig,
    TrainConfig,
    generation_run,
    launch,
)

paper = GenerationRecipe(
    model=RoentGenConfig(gradient_checkpointing=True),
    init_from=Path("checkpoints/sd-1-4"),
    pretrained=False,
    data=GenerationDataConfig(
        train="shards/mimic-cxr-pa/train",
        valid=Path("shards/mimic-cxr-pa/validate"),
        views=("PA",),
        valid_batch=16,
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=5e-5, weight_decay=1e-2, clip_norm=1.0, schedule=Constant()
    ),
    train=TrainConfig(
        run_dir=Path("runs/roentgen-mimic"),
        steps=60_000,
        global_batch=256,
        precision="bf16",
        channels_last=True,
        validate_every=2_500,
        checkpoint_every=500,
    ),
)


def variant(name: str, model: LatentDiffusionConfig) -> GenerationRecipe:
    """Return `paper` with another model, in a run folder of its own."""
    train = dataclasses.replace(paper.train, run_dir=Path(f"runs/roentgen-{name}"))
    return dataclasses.replace(paper, model=model, train=train)


unet_only = variant("unet-only", dataclasses.replace(paper.model, train_text=False))
domain_text = dataclasses.replace(
    variant(
        "domain-text",
        dataclasses.replace(
            paper.model, text_encoder="radbert", text_mask=True, train_text=False, max_tokens=128
        ),
    ),
    pretrained=True,
)
from_scratch = dataclasses.replace(variant("from-scratch", paper.model), random_unet=True)
tiny = GenerationRecipe(
    model=LatentDiffusionConfig(
        image_size=64,
        fit="crop",
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
        max_tokens=48,
        target="v",
        ema_decay=0.995,
    ),
    autoencoder=Path("quickstart/autoencoder/best"),
    text_from=Path("quickstart/convirt/best"),
    pretrained=False,
    data=GenerationDataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        views=("PA", "AP"),
        cache=Path("quickstart/latents"),
        workers=1,
        valid_batch=64,
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-3,
        betas=(0.9, 0.99),
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=50),
    ),
    train=TrainConfig(
        run_dir=Path("quickstart/roentgen"), epochs=8, global_batch=32, precision="bf16"
    ),
)

PRESETS = {
    "paper": paper,
    "unet-only": unet_only,
    "domain-text": domain_text,
    "from-scratch": from_scratch,
    "tiny": tiny,
}
MAKE_DATA = (
    "medvl shards mimic-cxr --root MIMIC-CXR --views PA --short-side 512 --out shards/mimic-cxr-pa"
)
PHANTOM = """medvl phantom quickstart
    medvl train convirt tiny
    medvl train autoencoder_cxr tiny
    medvl train roentgen_mimic tiny"""
prepare = generation_run("roentgen_mimic", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "RoentGen on MIMIC-CXR.")
