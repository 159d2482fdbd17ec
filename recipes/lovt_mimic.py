"""LoVT on MIMIC-CXR (Mueller et al., arXiv 2112.02889, ECCV 2022).

    torchrun --nproc-per-node 8 recipes/lovt_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/lovt_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    # without local negatives (arXiv 2211.07254); `analysis-tiny`
    torchrun recipes/lovt_mimic.py analysis
    torchrun recipes/lovt_mimic.py tiny --help-all     # every setting

Preset `paper`: the authors' configuration LoVT_100: findings and impression with swapped sentences,
ConVIRT's augmentation, ImageNet's ResNet-50 and Bio_ClinicalBERT from the hub on first use. Updates
have 16 micro-batches of 32 pairs, whose negatives are the other 31. Sentences have at least three
tokens, of which the full stop is one.
Differences: sentences are split by medvl, not by stanza; every frontal image is a sample, where the
released code draws one of each study; bf16 autocast for fp16; one cosine over the run, where the
released code's rate falls over one epoch and rises again over the next. Images are frontal, as
published: make the shards with `--views PA AP`, because the preset reads all images of its shards.
Preset `analysis` has the same data and optimiser; its paper's were not available.

Presets `tiny` and `analysis-tiny`: a ResNet-10 and a three-layer BERT from scratch, whose last
stage keeps the stride so that images of 112 pixels have 7 x 7 regions as published, a weaker
augmentation without the flip, and a higher rate.
"""

import dataclasses
from pathlib import Path
from typing import Any

from medvl.data import ConVIRTAugmentation, SwappedSentences
from medvl.eval import ZeroShotEval
from medvl.models import LocalAnalysisConfig, LoVTConfig
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=LoVTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=SwappedSentences(min_tokens=2, swap_probability=0.6),
        image=ConVIRTAugmentation(size=224, flip="plain"),
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-4, weight_decay=1e-6, schedule=Cosine()),
    train=TrainConfig(
        run_dir=Path("runs/lovt-mimic"),
        epochs=100,
        global_batch=512,
        accumulate=16,
        precision="bf16",
        channels_last=True,
        early_stop_patience=10,
    ),
)
SMALL: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {"output_stride": 16},
    "text_encoder": "tiny_bert",
    "image_size": 112,
    "fit": "squash",
    "projection_dim": 128,
    "hidden_dim": 512,
    "frozen_text_layers": 0,
    "attention_dropout": 0.0,
    "max_tokens": 256,
}
tiny = quickstart.zero_shot_recipe(
    "lovt", LoVTConfig(**SMALL), dataclasses.replace(quickstart.DATA, text=SwappedSentences())
)
analysis = dataclasses.replace(
    paper,
    model=LocalAnalysisConfig(),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/local-analysis-mimic")),
)
analysis_tiny = dataclasses.replace(
    tiny,
    model=LocalAnalysisConfig(**SMALL),
    train=dataclasses.replace(tiny.train, run_dir=Path("quickstart/local-analysis")),
)

PRESETS = {"paper": paper, "tiny": tiny, "analysis": analysis, "analysis-tiny": analysis_tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("lovt_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "LoVT on MIMIC-CXR.")
