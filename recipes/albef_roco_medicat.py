"""ALBEF on ROCO and MedICaT (Li et al., arXiv 2107.07651, NeurIPS 2021).

    torchrun --nproc-per-node 8 recipes/albef_roco_medicat.py
    torchrun recipes/albef_roco_medicat.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/albef_roco_medicat.py tiny --help-all     # every setting
    # fine-tune for VQA
    torchrun recipes/vqa_finetune.py --init-from runs/albef/best --head ranking --optim.lr 2e-5

Preset `paper`: the published settings on figures instead of photographs: ViT-B/16 at 256 pixels,
BERT-base in two halves; AdamW at 1e-4 with weight decay 0.02, warmed up for 2,000 steps and then
cosine to 1e-5, 30 epochs in batches of 512; crops of 0.2 to 1.0 of the image. Differences: alpha
grows in the first epoch of these figures, about 500 steps; no RandAugment, and no flips, because
texts name sides; images are shrunk by averaging areas, instead of bicubic; captions and questions
keep their case, punctuation and [SEP], which the released code removes (`load_tokenizer(FOLDER,
cleaning="albef", closing=False)`).

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT, with
a fusion-encoder of two layers, a short queue, and a teacher that follows faster.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, RandomSection
from medvl.models import ALBEFConfig
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    Recipe,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

paper = Recipe(
    model=ALBEFConfig(ramp_steps=500),
    pretrained=True,
    data=DataConfig(
        train="shards/roco/train",
        extra_train=(Path("shards/medicat/train"),),
        valid=Path("shards/roco/validation"),
        text=RandomSection(),
        image=ConVIRTAugmentation.crop(256, area=(0.2, 1.0)),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.02,
        schedule=Cosine(warmup_steps=2000, min_lr=1e-5),
    ),
    train=TrainConfig(run_dir=Path("runs/albef"), epochs=30, global_batch=512, precision="bf16"),
)
tiny = quickstart.fusion_recipe("albef", ALBEFConfig(**quickstart.ALIGNED))

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards roco --root ROCO --splits repaired --out shards/roco
    medvl shards medicat --root MEDICAT --out shards/medicat"""
prepare = pretraining_run("albef_roco_medicat", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "ALBEF on ROCO and MedICaT.")
