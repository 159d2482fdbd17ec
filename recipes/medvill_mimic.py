"""MedViLL on MIMIC-CXR (Moon et al., arXiv 2105.11333, JBHI 2022).

    torchrun --nproc-per-node 8 recipes/medvill_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/medvill_mimic.py tiny            # the phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/medvill_mimic.py tiny --help     # every setting
    torchrun recipes/vqa_finetune.py --start runs/medvill-mimic/best     # then it answers questions

Preset `paper`: BERT-base over 180 cells of a ResNet-50 at 512 pixels and the report, masked words and image-text
matching from one pass, the bidirectional-autoregressive mask; AdamW at 1e-5, 50 epochs, batch 128. Its shards are of
the AP views: `medvl shards mimic-cxr --views AP --short-side 512`. The paper crops 0.8 to 1.1 of the image; no crop
is larger than the image here.

Preset `tiny`: the ResNet-10 and the three-layer BERT of the quickstart, from its ConVIRT's towers where `start` names
its checkpoint, else from scratch.
"""

import dataclasses
import sys
from pathlib import Path

from medvl.data.text import WholeText
from medvl.data.transforms import ConVIRTAugmentation
from medvl.errors import MedvlError
from medvl.models.fusion_configs import MedViLLConfig
from medvl.train.config import Constant, Cosine, OptimConfig, TrainConfig
from medvl.train.data import DataConfig
from medvl.train.launch import choose
from medvl.train.serialize import to_dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: MedViLLConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    start: Path | None = None
    """Checkpoint of another system whose image and text encoder are taken; None takes none."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    model=MedViLLConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr-ap/train",
        valid=Path("shards/mimic-cxr-ap/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation(
            size=512,
            flip="off",
            area=(0.8, 1.0),
            rotation=0,
            translation=0,
            scale=(1.0, 1.0),
            brightness=0,
            contrast=0,
            blur_sigma=(0.1, 0.1),
        ),
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-5, weight_decay=0.01, schedule=Constant()),
    train=TrainConfig(
        run_dir=Path("runs/medvill-mimic"), epochs=50, global_batch=128, precision="bf16", channels_last=True
    ),
)
tiny = Recipe(
    model=MedViLLConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        frozen_image_layers=0,
        attention="bidirectional",
        max_tokens=48,
    ),
    pretrained=False,
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=WholeText(sections=("impression",)),
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=5e-4, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/medvill"),
        epochs=10,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        validate_every=250,
        checkpoint_every=250,
    ),
)

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views AP --short-side 512 --out shards/mimic-cxr-ap
From nothing, for a try on the phantom corpus:
    bash scripts/quickstart.sh"""


def main(recipe: Recipe) -> None:
    """Data, model, training: the verbs in order."""
    recipe.data.check(MAKE_DATA)
    from medvl.models import create_model, load_towers
    from medvl.train import seeded, train
    from medvl.train.data import open_data

    with seeded(recipe.train.seed):
        model = create_model(recipe.model, pretrained=recipe.pretrained, tokenizer=recipe.data.tokenizer)
    if recipe.start is not None:
        load_towers(model, recipe.start)
    opened = open_data(recipe.data, model, recipe.train.micro_batch)
    result = train(
        model,
        opened.train,
        valid_loader=opened.valid,
        optim=recipe.optim,
        config=recipe.train,
        run={"recipe": "medvill_mimic", "settings": to_dict(recipe), **opened.described},
    )
    print(result)


if __name__ == "__main__":
    try:
        main(choose({"paper": paper, "tiny": tiny}, description="MedViLL on MIMIC-CXR."))
    except MedvlError as error:
        sys.exit(f"error: {error}")
