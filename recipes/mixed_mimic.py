"""Pretraining on mixed data: pairs of MIMIC-CXR, images of NIH ChestX-ray14 (Wang et al., arXiv
2103.16022).

    torchrun --nproc-per-node 8 recipes/mixed_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    # half of the patients unpaired
    torchrun recipes/mixed_mimic.py --data.weights 1 1 --data.paired-fraction 0.5
    torchrun recipes/mixed_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/mixed_mimic.py tiny --help-all     # every setting
    # the pairs alone
    torchrun recipes/mixed_mimic.py tiny --data.others drop --train.run-dir quickstart/mixed-half
    torchrun recipes/vqa_finetune.py --init-from runs/mixed-mimic/best     # fine-tune for VQA

Folders in `--data.extra-train` hold pairs, images without a text, or texts without an image (a
table converted without `--image-column`), and `--data.weights` states their shares of an epoch.
`--data.paired-fraction` separates the images and texts of the other patients of `--data.train`. The
options are those of every recipe; other fusion-encoders take such data too, and average each loss
over the samples that have what it needs.

Preset `paper`: ResNet-50 at 256 pixels and BERT-base; AdamW at 5e-5 for the encoders, 30 epochs in
batches of 128. The corpora are the paper's; its optimiser is not known, and these are medvl's
settings.

Preset `tiny`: starts from the ResNet-10 and the three-layer BERT of the quickstart's ConVIRT; half
of the phantom's patients keep their pairs, and the images and texts of the others are apart.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import MixedConfig
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
    model=MixedConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        extra_train=(Path("shards/nih/train"),),
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation.crop(256, area=(0.8, 1.0)),
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=5e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=2000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/mixed-mimic"),
        epochs=30,
        global_batch=128,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.fusion_recipe(
    "mixed",
    MixedConfig(**quickstart.ENCODERS, **quickstart.FASTER_FUSION, width=192, scales=(1, 2)),
)
tiny = dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, paired_fraction=0.5))

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
    medvl shards nih-cxr14 --root NIH --out shards/nih"""
prepare = pretraining_run("mixed_mimic", MAKE_DATA)

if __name__ == "__main__":
    launch(prepare, PRESETS, "Pretraining on pairs, images alone and texts alone.")
