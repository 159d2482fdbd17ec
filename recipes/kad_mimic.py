"""KAD on MIMIC-CXR: queries of entity names, images against reports (Zhang et al., Nature
Communications 2023).

    torchrun --nproc-per-node 4 recipes/kad_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/kad_mimic.py --init-from runs/kebert/best ...       # the text stage
    torchrun recipes/kad_mimic.py --model.text-weights MED-KEBERT.safetensors ...
    torchrun recipes/kad_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/kad_mimic.py tiny --help-all     # every setting

Preset `paper`: the settings of the authors' configuration. ImageNet's ResNet-50 and PubMedBERT come
from the hub on first use. The text encoder's own stage, the contrast of UMLS concepts and
definitions, is `recipes/kebert.py`: start from its run, or give the published file. Differences:
entities are the label columns and reports the labeler's statements, where the authors have 40
entities and strings of RadGraph; the learned scale is one, its vectors are of unit length and all
ranks are compared; changes of brightness and contrast in place of RandAugment; mirrored images have
mirrored texts; the rate falls with every step, the released one with every epoch, which is the same
within 3 % of the highest. Evaluations keep the last batch, and choose thresholds on validation
data, where the released code does neither.

Goals on MIMIC-CXR with prompts `statements`, the published figures: AUROC of CheXpert's five 0.90,
of ChestX-ray14 0.79, of PadChest's 192 labels 0.75. A run of ours needs the credentialed data.

Preset `tiny`: 12 epochs from the encoders of `recipes/convirt_mimic.py tiny`, with its augmentation
and schedule.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, Statements
from medvl.eval import ZeroShotEval
from medvl.models import KADConfig
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
    model=KADConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=Statements(joined=True),
        image=dataclasses.replace(
            ConVIRTAugmentation.crop(512, area=(0.2, 1.0), flip="swap_text"),
            brightness=0.4,
            contrast=0.4,
        ),
    ),
    # The released code advances its schedule by an epoch every 100 steps until the warm-up is over.
    optim=OptimConfig(
        optimizer="adamw",
        lr=5e-5,
        weight_decay=0.02,
        schedule=Cosine(warmup_steps=2_000, min_lr=1e-6),
    ),
    train=TrainConfig(
        run_dir=Path("runs/kad-mimic"),
        epochs=100,
        global_batch=64,
        precision="bf16",
        channels_last=True,
    ),
    prompts="statements",
)
tiny = quickstart.zero_shot_from_convirt(
    "kad",
    KADConfig(**{**quickstart.QUERIES, "projection_dim": 192, "max_tokens": 96}),
    dataclasses.replace(quickstart.DATA, text=Statements(joined=True)),
    prompts="statements",
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("kad_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "KAD on MIMIC-CXR.")
