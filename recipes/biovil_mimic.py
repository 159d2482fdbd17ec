"""BioViL and BioViL-L on MIMIC-CXR (Boecking et al., ECCV 2022).

    torchrun --nproc-per-node 8 recipes/biovil_mimic.py --data.train DIR/train \\
        --data.valid DIR/validate
    torchrun --nproc-per-node 8 recipes/biovil_mimic.py local ...  # BioViL-L: with the local loss
    torchrun recipes/biovil_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores
    torchrun recipes/biovil_mimic.py tiny --help-all      # every setting

Presets `paper` and `local`: the released model's sizes, the impression as the text and the findings
as the second text (the impression's place is taken by the findings where it is missing; such
samples take no part in section matching).
The training code was not released: optimiser, augmentation, batch, epochs and the weights of the
losses are not
confirmed. Differences from the paper: bf16 autocast; ImageNet's ResNet-50 in place of one
pretrained with SimCLR on MIMIC-CXR's images, which was not released; CXR-BERT as released, after
the joint training.

Preset `tiny`: a ResNet-10 and a three-layer BERT from scratch, as `recipes/convirt_mimic.py tiny`,
with a temperature of 0.1, which a thousand steps need. Preset `tiny-local` adds the local loss.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, TextPair, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import BioViLConfig
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

SECTIONS = TextPair(
    first=WholeText(sections=("impression",)),
    second=WholeText(sections=("findings",), missing="no_text"),
)

paper = ZeroShotRecipe(
    model=BioViLConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=SECTIONS,
        image=ConVIRTAugmentation.weak(480),
    ),
    optim=OptimConfig(
        optimizer="adamw", lr=2e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=1000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/biovil-mimic"),
        epochs=50,
        global_batch=512,
        precision="bf16",
        channels_last=True,
        packed_text=True,
    ),
)
local = dataclasses.replace(
    paper,
    model=BioViLConfig(local_weight=1.0),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/biovil-l-mimic")),
)
SMALL = BioViLConfig(
    image_encoder="resnet_tiny",
    text_encoder="tiny_bert",
    image_size=112,
    margin=0,
    fit="squash",
    temperature=0.1,
    mlm_weight=0.1,
    attention_dropout=0.0,
    max_tokens=64,
)
tiny = quickstart.zero_shot_recipe(
    "biovil", SMALL, dataclasses.replace(quickstart.DATA, text=SECTIONS)
)
tiny_local = dataclasses.replace(
    tiny,
    model=dataclasses.replace(SMALL, local_weight=0.5),
    train=dataclasses.replace(tiny.train, run_dir=Path("quickstart/biovil-l")),
)

PRESETS = {"paper": paper, "local": local, "tiny": tiny, "tiny-local": tiny_local}
MAKE_DATA = (
    "medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr --short-side 512"
)
prepare = zero_shot_run("biovil_mimic", MAKE_DATA, ZeroShotEval)

if __name__ == "__main__":
    launch(prepare, PRESETS, "BioViL on MIMIC-CXR.")
