"""BioViL-T on MIMIC-CXR (Bannur et al., CVPR 2023).

    torchrun --nproc-per-node 8 recipes/biovil_t_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun recipes/biovil_t_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/biovil_t_mimic.py tiny --help-all    # every setting

An image is trained with the patient's previous one, where the shards have the order of the studies.
Preset `paper`: the released model's sizes. The training code was not released: texts, optimiser,
augmentation, batch, epochs and weights of the losses are not confirmed. Differences from the paper:
bf16 autocast; masked words are predicted without the image; ImageNet's ResNet-50 and CXR-BERT as it
was released with BioViL.

Preset `tiny`: a ResNet-10 and a three-layer BERT from scratch, as `recipes/biovil_mimic.py tiny`,
with complete reports, and a pooler of one block and 128 dimensions.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import BioViLTConfig
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
    model=BioViLTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation.weak(448),
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=2e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=1000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/biovil-t-mimic"),
        epochs=50,
        global_batch=512,
        precision="bf16",
        channels_last=True,
        packed_text=True,
    ),
)
tiny = quickstart.zero_shot_recipe(
    "biovil-t",
    BioViLTConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        margin=0,
        fit="squash",
        temperature=0.1,
        mlm_weight=0.1,
        attention_dropout=0.0,
        max_tokens=96,
        local_weight=0.5,
        pooler_dim=128,
        pooler_blocks=1,
    ),
    dataclasses.replace(quickstart.DATA, text=WholeText()),
)
PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = (
    "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr --short-side 512"
)
prepare = zero_shot_run("biovil_t_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "BioViL-T on MIMIC-CXR.")
