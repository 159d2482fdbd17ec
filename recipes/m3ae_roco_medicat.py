"""M3AE on ROCO and MedICaT (Chen et al., arXiv 2209.07098, MICCAI 2022).

    torchrun --nproc-per-node 8 recipes/m3ae_roco_medicat.py
    # within scripts/quickstart_vqa.sh: phantom, two CPU cores
    torchrun recipes/m3ae_roco_medicat.py tiny
    torchrun recipes/m3ae_roco_medicat.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/m3ae/best     # fine-tune for VQA

Preset `paper`: CLIP's ViT-B/16 without its last block, RoBERTa-base, six co-attention layers a
stream; 100,000 steps of 256 pairs at 288 pixels, 1e-5 for the encoders and five times that for the
rest, warmed up for a tenth and then linear.
Differences from the paper: a figure is one sample with one of its texts selected at random, instead
of one sample per pair; the checkpoint is selected by the validation loss, instead of a sum of
accuracies and a loss; images are shrunk by averaging areas, instead of bicubic (`--model.resize
bicubic_antialias` for inference), and CLIP's positions are resized to 288 pixels with antialiasing,
which the released code leaves out.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of a ConVIRT on the same figures
instead of CLIP and RoBERTa (`bash scripts/quickstart_vqa.sh` trains it first). A vision Transformer
learns little from so few images, so masked patches are cells of the ResNet's grid, with positions
at the input of the fusion-encoder. Because there are few steps, twice the paper's fraction of words
is masked.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, RandomSection
from medvl.models import M3AEConfig
from medvl.train import (
    DataConfig,
    Linear,
    OptimConfig,
    Recipe,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=M3AEConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/roco-references/train",
        extra_train=(Path("shards/medicat-radiology/train"),),
        valid=Path("shards/roco-references/validation"),
        text=RandomSection(),
        image=EvalTransform(size=288),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-5,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule=Linear(warmup_steps=10_000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/m3ae"),
        steps=100_000,
        global_batch=256,
        precision="bf16",
        validate_every=5000,
        checkpoint_every=5000,
    ),
)
tiny = Recipe(
    model=M3AEConfig(
        **{**quickstart.ENCODERS, "max_tokens": 32},
        **quickstart.FASTER_FUSION,
        width=192,
        image_positions=True,
        mim_layer=1,
        decoder_width=96,
        decoder_layers=2,
        decoder_heads=3,
        mlm_probability=0.3,
    ),
    pretrained=False,
    init_from=Path("quickstart/figures-convirt/best"),
    data=DataConfig(
        train="quickstart/roco-shards/train",
        extra_train=(Path("quickstart/medicat-shards/train"),),
        valid=Path("quickstart/roco-shards/validation"),
        tokenizer=Path("quickstart/figure-vocab"),
        text=RandomSection(),
        image=EvalTransform(size=112, fit="squash"),
        workers=1,
    ),
    optim=dataclasses.replace(quickstart.OPTIM, lr=5e-4),
    train=TrainConfig(
        run_dir=Path("quickstart/m3ae"),
        steps=240,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        packed_text=True,
        validate_every=120,
        checkpoint_every=120,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards roco --root ROCO --splits repaired --references MEDICAT/roco_references \\
        --out shards/roco-references
    medvl shards medicat --root MEDICAT --radiology-only --out shards/medicat-radiology"""
PHANTOM = """medvl phantom roco --out quickstart/roco --patients 1500 --size 160
    medvl phantom medicat --out quickstart/medicat --patients 1500 --size 160
    medvl shards roco --root quickstart/roco --references quickstart/roco/roco_references \\
        --out quickstart/roco-shards --short-side 160
    medvl shards medicat --root quickstart/medicat --radiology-only --out quickstart/medicat-shards --short-side 160
    medvl vocab --data quickstart/roco-shards/train --out quickstart/figure-vocab --size 2000
    medvl train convirt tiny --train.epochs 5 --prompts None --data.train quickstart/roco-shards/train \\
        --data.extra-train quickstart/medicat-shards/train --data.valid quickstart/roco-shards/validation \\
        --data.tokenizer quickstart/figure-vocab --data.text.sections caption \\
        --train.best-metric loss --train.best-mode min --train.run-dir quickstart/figures-convirt
    medvl train m3ae tiny"""
prepare = pretraining_run("m3ae_roco_medicat", MAKE_DATA, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "M3AE on ROCO and MedICaT.")
