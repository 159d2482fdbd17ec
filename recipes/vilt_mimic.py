"""ViLT on MIMIC-CXR (Kim et al., arXiv 2102.03334, ICML 2021).

    torchrun --nproc-per-node 8 recipes/vilt_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/vilt_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/vilt_mimic.py tiny --help-all     # every setting
    torchrun recipes/vqa_finetune.py --init-from runs/vilt-mimic/best     # fine-tune for VQA

Preset `paper`: one ViT-B/32 at 384 pixels over patches and 40 tokens; AdamW at 1e-4, 25,000 steps
of 4,096 pairs, of which 2,500 warm up, then linear decay. Vocabulary:
    medvl vocab --data shards/mimic-cxr-frontal/train --out vocab/mimic --size 30000 --max-tokens 40
No commit of the ViT's weights is pinned; name one to start from: `--model.image-weights
timm/vit_base_patch32_384.augreg_in21k_ft_in1k@COMMIT`. Images are not augmented, because texts name
sides and intensities. They are square and shrunk by averaging areas, where the released code keeps
their aspect and is bicubic.

Preset `tiny`: a small ViT from scratch, which learns little from so few images.
"""

import dataclasses
from pathlib import Path

from medvl.data import EvalTransform, WholeText
from medvl.models import ViLTConfig
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
    model=ViLTConfig(),
    pretrained=False,
    data=DataConfig(
        train="shards/mimic-cxr-frontal/train",
        valid=Path("shards/mimic-cxr-frontal/validate"),
        tokenizer=Path("vocab/mimic"),
        text=WholeText(),
        image=EvalTransform(size=384),
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        schedule=Linear(warmup_steps=2500),
    ),
    train=TrainConfig(
        run_dir=Path("runs/vilt-mimic"), steps=25_000, global_batch=4096, precision="bf16"
    ),
)
tiny = Recipe(
    model=ViLTConfig(
        image_encoder="timm:vit_tiny_patch16_224",
        image_arguments={"depth": 6},
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 0},
        image_size=112,
        fit="squash",
        max_tokens=48,
    ),
    pretrained=False,
    data=quickstart.DATA,
    optim=dataclasses.replace(quickstart.OPTIM, lr=1e-3),
    train=dataclasses.replace(
        quickstart.TRAIN,
        run_dir=Path("quickstart/vilt"),
        epochs=12,
        scale_below=12 * quickstart.SCALED,
        best_metric="loss",
        best_mode="min",
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr-frontal
    medvl vocab --data shards/mimic-cxr-frontal/train --out vocab/mimic --size 30522 --max-tokens 40"""
prepare = pretraining_run("vilt_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "ViLT on MIMIC-CXR.")
