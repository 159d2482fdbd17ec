"""Findings of Open-i from image and report, on any fusion-encoder (Li, Wang and Luo, arXiv
2009.01523, BIBM 2020).

    torchrun recipes/classify_openi.py --init-from runs/m3ae/best
    torchrun recipes/classify_openi.py --init-from runs/m3ae/best --modalities image \\
        --data.fraction 0.1
    # the phantom, from the quickstart's ConVIRT, two CPU cores
    torchrun recipes/classify_openi.py tiny
    torchrun recipes/classify_openi.py tiny --help-all     # every setting
    medvl eval classify --checkpoint runs/openi/best --data shards/openi/test \\
        --valid shards/openi/validate \\
        --missing ignore

The 15 labels come from the MeSH terms of the report, so that a model that reads the report is close
to solving them. Presets `paper-image` and `paper-text` are the two baselines that show what image
and report contribute: in the first every text is absent, in the second every image.
`--data.fraction` selects a fraction of the training patients. `--init-from` is a checkpoint of a
fusion-encoder, of a head on one, or of a dual-encoder; above the encoders of the last, `--model` is
trained from scratch. Images have the size and fit of the checkpoint, or the size `--image-size`.

Preset `paper`: 5e-5 for 6 epochs, batch 18, a linear schedule with a warm-up of a tenth, reports of
128 tokens, the head Linear, GELU, LayerNorm, Linear. Differences: the paper has no validation data
and its mean is without "Normal" (here No Finding); AdamW instead of BertAdam; starting from a
checkpoint that this recipe does not train.

Presets `tiny`, `tiny-image`, `tiny-text`: the phantom in the layout of Open-i, made by

    medvl phantom openi --out quickstart/openi --patients 1200 --size 160
    medvl shards openi --root quickstart/openi --out quickstart/openi-shards --views FRONTAL \\
        --short-side 160
"""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.data import ConVIRTAugmentation
from medvl.eval import ClassifyEval, LabelPolicy
from medvl.models import DualStreamConfig
from medvl.train import (
    ClassificationDataConfig,
    ClassifierRecipe,
    Linear,
    OptimConfig,
    TrainConfig,
    classifier_run,
    launch,
    quickstart,
)

paper = ClassifierRecipe(
    init_from=Path("runs/m3ae/best"),
    max_tokens=128,
    model=DualStreamConfig(),
    data=ClassificationDataConfig(
        train=Path("shards/openi/train"), valid=Path("shards/openi/validate")
    ),
    optim=OptimConfig(lr=5e-5, weight_decay=0.01, schedule=Linear(warmup_steps=96)),
    train=TrainConfig(
        run_dir=Path("runs/openi"),
        epochs=6,
        global_batch=18,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="classify/auroc_macro",
        best_mode="max",
    ),
)
tiny = ClassifierRecipe(
    init_from=Path("quickstart/convirt/best"),
    model=DualStreamConfig(
        image_arguments={},
        width=192,
        layers=2,
        heads=3,
        intermediate=768,
        image_positions=True,
        fusion_lr_mult=2.0,
    ),
    head_lr_mult=2.0,
    data=ClassificationDataConfig(
        train=Path("quickstart/openi-shards/train"),
        valid=Path("quickstart/openi-shards/validate"),
        image=dataclasses.replace(ConVIRTAugmentation.weak(112), area=(0.8, 1.0)),
        workers=1,
    ),
    optim=dataclasses.replace(quickstart.OPTIM, lr=3e-4),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("quickstart/openi-classifier"),
        epochs=12,
        global_batch=32,
        channels_last=True,
    ),
)


def reading(preset: ClassifierRecipe, modalities: Literal["image", "text"]) -> ClassifierRecipe:
    """Return a preset for one modality alone, with a run folder of its own."""
    folder = preset.train.run_dir.with_name(f"{preset.train.run_dir.name}-{modalities}")
    return dataclasses.replace(
        preset, modalities=modalities, train=dataclasses.replace(preset.train, run_dir=folder)
    )


paper_image = reading(paper, "image")
paper_text = reading(paper, "text")
tiny_image = reading(tiny, "image")
tiny_text = reading(tiny, "text")

PRESETS = {
    "paper": paper,
    "paper-image": paper_image,
    "paper-text": paper_text,
    "tiny": tiny,
    "tiny-image": tiny_image,
    "tiny-text": tiny_text,
}
MAKE_DATA = "medvl shards openi --root OPENI --views FRONTAL --out shards/openi"
PHANTOM = """medvl phantom quickstart
    medvl train convirt tiny
    medvl phantom openi --out quickstart/openi --patients 1200 --size 160
    medvl shards openi --root quickstart/openi --out quickstart/openi-shards --views FRONTAL --short-side 160"""
prepare = classifier_run("classify_openi", MAKE_DATA, LabelPolicy, ClassifyEval, PHANTOM)

if __name__ == "__main__":
    launch(prepare, PRESETS, "Findings of Open-i.")
