"""BFSPR on MIMIC-CXR (after Seibold et al., MICCAI 2022, arXiv 2205.07139): a design variant.

    torchrun --nproc-per-node 8 recipes/bfspr_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/bfspr_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/bfspr_mimic.py tiny --help-all     # every setting

Preset `paper`: the authors released no code. Corpus, whole reports, and the global and local terms
are the paper's; optimiser, schedule and batch are chosen here, and the augmentation is ConVIRT's
with mirrored texts.

Preset `tiny`: the encoders, text, augmentation and schedule of `recipes/convirt_mimic.py tiny`,
with a second view.
"""

from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import BFSPRConfig
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
    model=BFSPRConfig(max_tokens=256),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation(size=224),
    ),
    optim=OptimConfig(
        optimizer="adam", lr=1e-4, weight_decay=1e-6, schedule=Cosine(warmup_steps=1000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/bfspr-mimic"),
        epochs=50,
        global_batch=128,
        precision="bf16",
        channels_last=True,
    ),
)
tiny = quickstart.zero_shot_recipe(
    "bfspr",
    BFSPRConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        attention_dropout=0.0,
        max_tokens=48,
        projection_dim=128,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr"
prepare = zero_shot_run("bfspr_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "BFSPR on MIMIC-CXR.")
