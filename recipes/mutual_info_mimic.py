"""MutualInfo on MIMIC-CXR (Liao et al., arXiv 2103.04537, MICCAI 2021).

    torchrun recipes/mutual_info_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/mutual_info_mimic.py --model.local-weight 1 --model.global-weight 0      # regions and sentences
    torchrun recipes/mutual_info_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/mutual_info_mimic.py tiny --help     # every setting

Preset `paper`: the settings of the released code, which has the global part only. The image encoder starts from
scratch; ClinicalBERT is not on the hub, so give its folder: `--model.text-weights FOLDER`. Differences: one schedule,
10 % warm-up and linear decay, also for the image encoder and the critic, whose rate the code keeps constant; images of
8 bits; bf16 autocast. The code's batch of 8 was limited by its loop over pairs; the bound is at most ln of the number
of negatives, and larger batches cost little here (`--train.global-batch`).

Preset `tiny`: global and local part with the InfoNCE bound, the encoders, text, augmentation and schedule of
`recipes/convirt_mimic.py tiny`, one rate for both encoders.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import MutualInfoConfig
from medvl.train import Cosine, DataConfig, Linear, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: MutualInfoConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from: all weights of a MutualInfo, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=MutualInfoConfig(),
    pretrained=False,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=dataclasses.replace(
            ConVIRTAugmentation.crop(256, area=(1.0, 1.0)), rotation=20.0, translation=0.1
        ),  # no blur, no flip
    ),
    # Of about 240,000 frontal images, 100 epochs of batches of 8 have three million steps.
    optim=OptimConfig(optimizer="adamw", lr=5e-4, weight_decay=0.1, schedule=Linear(warmup_steps=300_000)),
    train=TrainConfig(run_dir=Path("runs/mutual-info-mimic"), epochs=100, global_batch=8, precision="bf16"),
)
tiny = Recipe(
    model=MutualInfoConfig(
        image_encoder="resnet_tiny",
        image_channels=3,
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        attention_dropout=0.0,
        max_tokens=48,
        bound="info_nce",
        critic_hidden=(256, 128),
        local_weight=1.0,
        text_lr_mult=1.0,
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
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/mutual-info"),
        epochs=14,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        validate_every=250,
        checkpoint_every=250,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
and then
    torchrun recipes/mutual_info_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("mutual_info_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "MutualInfo on MIMIC-CXR.")
