"""MutualInfo on MIMIC-CXR (Liao et al., arXiv 2103.04537, MICCAI 2021).

    torchrun recipes/mutual_info_mimic.py --model.text-weights CLINICALBERT \\
        --data.train DIR/train --data.valid ...
    # regions and sentences
    torchrun recipes/mutual_info_mimic.py --model.local-weight 1 --model.global-weight 0 ...
    torchrun recipes/mutual_info_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/mutual_info_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the released code, which has the global part only. The image encoder
starts from scratch; ClinicalBERT is not on the hub, so give its folder: `--model.text-weights
FOLDER`. Differences: one schedule, 10 % warm-up and linear decay, also for the image encoder and
the critic, whose rate the code keeps constant; images of 8 bits, divided by 255 and not by their
own maximum; no dropout of the text vector; bf16 autocast. The code's batch of 8 was limited by its
loop over pairs; larger batches cost little here (`--train.global-batch`).

Preset `tiny`: global and local part with the InfoNCE bound, the encoders, text, augmentation and
schedule of `recipes/convirt_mimic.py tiny`, one rate for both encoders; the text vector is the
maximum over tokens, because the text encoder starts from random weights.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import MutualInfoConfig
from medvl.train import (
    DataConfig,
    Linear,
    OptimConfig,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)

paper = ZeroShotRecipe(
    model=MutualInfoConfig(),
    pretrained=False,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=dataclasses.replace(
            ConVIRTAugmentation.crop(256, area=(1.0, 1.0)),
            aspect=(1.0, 1.0),
            rotation=20.0,
            translation=0.1,
        ),  # of the central square; no blur, no flip
    ),
    # Of about 240,000 frontal images, 100 epochs of batches of 8 have three million steps.
    optim=OptimConfig(
        optimizer="adamw", lr=5e-4, weight_decay=0.1, schedule=Linear(warmup_steps=300_000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/mutual-info-mimic"), epochs=100, global_batch=8, precision="bf16"
    ),
)
tiny = quickstart.zero_shot_recipe(
    "mutual-info",
    MutualInfoConfig(
        image_encoder="resnet_tiny",
        image_channels=3,
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        attention_dropout=0.0,
        max_tokens=48,
        text_pool="max",
        bound="info_nce",
        critic_hidden=(256, 128),
        local_weight=1.0,
        text_lr_mult=1.0,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("mutual_info_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MutualInfo on MIMIC-CXR.")
