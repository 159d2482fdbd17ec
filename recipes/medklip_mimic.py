"""MedKLIP on MIMIC-CXR: queries of described findings and their places (Wu et al., ICCV 2023, arXiv
2301.02228).

    torchrun --nproc-per-node 2 recipes/medklip_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/medklip_mimic.py --data.text.source file --data.text.file RADGRAPH.jsonl \\
        --data.text.relabel True
    torchrun recipes/medklip_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/medklip_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the authors' configuration, with an image encoder from scratch;
Bio_ClinicalBERT, which is frozen, comes from the hub on first use. Differences: entities are the
label columns and places those that the labeler's clauses name, or both from RadGraph (`medvl
knowledge radgraph`), a credentialed annotation, of which the authors have 75 observations and 51
places; changes of brightness and contrast in place of RandAugment; mirrored images have mirrored
places, where 25 of the published 51 name a side and keep it.

Goals on MIMIC-CXR with prompts `statements`, the published figures: AUROC of ChestX-ray14 0.73, of
CheXpert's five 0.88, of RSNA pneumonia 0.87. A run of ours needs the credentialed data.

Preset `tiny`: 12 epochs from the encoders of `recipes/convirt_mimic.py tiny`, with its augmentation
and schedule.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, Statements
from medvl.eval import ZeroShotEval
from medvl.models import MedKLIPConfig
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
    model=MedKLIPConfig(
        text_weights="emilyalsentzer/Bio_ClinicalBERT@d5892b39a4adaed74b92212a44081509db72f87b"
    ),
    pretrained=False,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=Statements(joined=True),
        image=dataclasses.replace(
            ConVIRTAugmentation.crop(224, area=(0.2, 1.0), flip="swap_text"),
            brightness=0.4,
            contrast=0.4,
        ),
    ),
    # The released code advances its schedule by an epoch every 100 steps until the warm-up is over.
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.02,
        schedule=Cosine(warmup_steps=500, min_lr=1e-5),
    ),
    train=TrainConfig(
        run_dir=Path("runs/medklip-mimic"),
        epochs=100,
        global_batch=48,
        precision="bf16",
        channels_last=True,
    ),
    prompts="statements",
)
tiny = quickstart.zero_shot_from_convirt(
    "medklip", MedKLIPConfig(**quickstart.QUERIES), prompts="statements"
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("medklip_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MedKLIP on MIMIC-CXR.")
