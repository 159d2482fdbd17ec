"""MUMC on ROCO, MedICaT and ImageCLEF 2022 (Li et al., arXiv 2307.05314, MICCAI 2023).

    torchrun recipes/mumc_figures.py --init-from runs/albef/best
    torchrun recipes/mumc_figures.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/mumc_figures.py tiny --help-all     # every setting
    # fine-tune for VQA
    torchrun recipes/vqa_finetune.py --init-from runs/mumc/best --head ranking --optim.lr 2e-5

Preset `paper`: both encoders of an ALBEF, whose statistics of the pixels it keeps; 256 pixels, 15 %
of the patches removed; AdamW at 3e-4 with weight decay 0.05, warmed up for 3,000 steps, times 0.9
after each of 30 epochs, batches of 32; crops of 0.2 to 1.0 of the image. Differences: the published
run starts from ALBEF's fusion-encoder and heads too, and trains on ROCO's test split too, this one
on its training split only; no RandAugment, and no flips, because texts name sides; images are
shrunk by averaging areas, instead of bicubic; captions and questions are not cleaned and end with
[SEP], as in `recipes/albef_roco_medicat.py`.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT, with
a fusion-encoder of two layers, a short queue, and a teacher that follows faster. Cells of the
ResNet's grid are removed, a quarter of them.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, RandomSection
from medvl.models import MUMCConfig
from medvl.train import (
    DataConfig,
    OptimConfig,
    Recipe,
    StepDecay,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=MUMCConfig(image_encoder="vit_b16", image_arguments={}),
    pretrained=False,
    init_from=Path("runs/albef/best"),
    data=DataConfig(
        train="shards/roco/train",
        extra_train=(Path("shards/medicat/train"), Path("shards/clef2022/train")),
        valid=Path("shards/roco/validation"),
        text=RandomSection(),
        image=ConVIRTAugmentation.crop(256, area=(0.2, 1.0)),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=3e-4,
        weight_decay=0.05,
        schedule=StepDecay(factor=0.9, epochs=1, warmup_steps=3000),
    ),
    train=TrainConfig(run_dir=Path("runs/mumc"), epochs=30, global_batch=32, precision="bf16"),
)
tiny = quickstart.fusion_recipe("mumc", MUMCConfig(**quickstart.ALIGNED, mask_ratio=0.25))

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards roco --root ROCO --splits repaired --out shards/roco
    medvl shards medicat --root MEDICAT --out shards/medicat
    medvl shards table --table CLEF2022.csv --name clef2022 --image-column file --patient-column article \
        --text-column caption --out shards/clef2022"""
prepare = pretraining_run("mumc_figures", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MUMC on ROCO, MedICaT and ImageCLEF 2022.")
