"""LXMERT on MIMIC-CXR (Tan and Bansal, arXiv 1908.07490, EMNLP 2019).

    torchrun --nproc-per-node 8 recipes/lxmert_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/lxmert_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/lxmert_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/lxmert-mimic/best     # fine-tune for VQA

Preset `paper`: nine layers over words, five over the cells of a ResNet-50 at 224 pixels and five
across both; AdamW at 1e-4 with linear decay, batch 256, 20 epochs, gradients clipped at 1. The
paper's sentences have 20 tokens, reports have 128 here; it warms up for a twentieth of the run,
here for 1,000 steps; and it starts from scratch, here from BERT.
Regions of a detector as in the paper: `--model.image-encoder regions:1024+4 --model.region-classes
91 --data.regions NAME`, for the width, the classes and the name of what `medvl regions` wrote.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT.
"""

from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.models import LXMERTConfig
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
    model=LXMERTConfig(max_tokens=128),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-frontal/train",
        valid=Path("shards/mimic-cxr-frontal/validate"),
        text=WholeText(),
        image=EvalTransform(size=224),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.01,
        clip_norm=1.0,
        schedule=Linear(warmup_steps=1000),
    ),
    train=TrainConfig(
        run_dir=Path("runs/lxmert-mimic"),
        epochs=20,
        global_batch=256,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.fusion_recipe(
    "lxmert", LXMERTConfig(**quickstart.ENCODERS, **quickstart.FUSION, image_layers=1)
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr-frontal"
prepare = pretraining_run("lxmert_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "LXMERT on MIMIC-CXR.")
