"""MAVL on MIMIC-CXR: queries of the visual aspects of findings (Phan et al., CVPR 2024, arXiv
2403.07636).

    torchrun --nproc-per-node 2 recipes/mavl_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/mavl_mimic.py --data.text.source file --data.text.file RADGRAPH.jsonl \\
        --data.text.relabel True
    torchrun recipes/mavl_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/mavl_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the authors' configuration, with ImageNet's ResNet-50;
Bio_ClinicalBERT, which is frozen, comes from the hub on first use. Differences: entities are the
label columns and places those of the labeler's clauses, or both from RadGraph (`medvl knowledge
radgraph`), where the authors have 75 observations and 51 places of RadGraph; aspects are written by
hand and not by a language model; changes of brightness and contrast in place of RandAugment;
mirrored images have mirrored places. The authors train on validation and test reports as well, and
report different epochs of a run on different test sets; here validation data choose one.

Goals on MIMIC-CXR with prompts `statements`, the published figures: AUROC of CheXpert's five 0.90,
of ChestX-ray14 0.74, of RSNA pneumonia 0.86, of SIIM pneumothorax 0.92. A run of ours needs the
credentialed data.

Preset `tiny`: 12 epochs from the encoders of `recipes/convirt_mimic.py tiny`, with its augmentation
and schedule.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, Statements
from medvl.eval import ZeroShotEval
from medvl.models import MAVLConfig
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
    model=MAVLConfig(
        text_weights="emilyalsentzer/Bio_ClinicalBERT@d5892b39a4adaed74b92212a44081509db72f87b",
        contrast_targets="multi_hot",
    ),
    pretrained=True,
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
        run_dir=Path("runs/mavl-mimic"),
        epochs=60,
        global_batch=128,
        precision="bf16",
        channels_last=True,
    ),
    prompts="statements",
)
tiny = quickstart.zero_shot_from_convirt(
    "mavl", MAVLConfig(**quickstart.QUERIES), prompts="statements"
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("mavl_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "MAVL on MIMIC-CXR.")
