"""UNITER on MIMIC-CXR (Chen et al., arXiv 1909.11740, ECCV 2020).

    torchrun --nproc-per-node 8 recipes/uniter_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/uniter_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/uniter_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/uniter-mimic/best     # fine-tune for VQA

Preset `paper`: BERT-base over the cells of a ResNet-50 at 224 pixels and 60 words; one task per
step; AdamW at 5e-5, 200,000 steps of which 10,000 warm up, gradients clipped at 5. The paper packs
20,480 tokens into a batch; here it is 160 pairs. Regions of a detector as in the paper:
`--model.image-encoder regions:1024+7 --model.region-classes 91 --data.regions NAME`, for the width,
the classes and the name of what `medvl regions` wrote.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT.
"""

from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.models import UNITERConfig
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
    model=UNITERConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-frontal/train",
        valid=Path("shards/mimic-cxr-frontal/validate"),
        text=WholeText(),
        image=EvalTransform(size=224),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-5,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        clip_norm=5.0,
        schedule=Linear(warmup_steps=10_000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/uniter-mimic"),
        steps=200_000,
        global_batch=160,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.fusion_recipe("uniter", UNITERConfig(**quickstart.ENCODERS))

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr-frontal"
prepare = pretraining_run("uniter_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "UNITER on MIMIC-CXR.")
