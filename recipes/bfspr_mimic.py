"""BFSPR on MIMIC-CXR (after Seibold et al., MICCAI 2022, arXiv 2205.07139): a design variant.

    torchrun --nproc-per-node 8 recipes/bfspr_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/bfspr_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/bfspr_mimic.py tiny --help     # every setting

Preset `paper`: the authors released no code. Corpus, whole reports, and the global and local terms are the paper's;
optimiser, schedule and batch are chosen here, and the augmentation is ConVIRT's with mirrored texts.

Preset `tiny`: the encoders, text, augmentation and schedule of `recipes/convirt_mimic.py tiny`, with a second view.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import BFSPRConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: BFSPRConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from: all weights of a BFSPR, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=BFSPRConfig(max_tokens=256),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation(size=224),
    ),
    optim=OptimConfig(optimizer="adam", lr=1e-4, weight_decay=1e-6, schedule=Cosine(warmup_steps=1000)),
    train=TrainConfig(
        run_dir=Path("runs/bfspr-mimic"), epochs=50, global_batch=128, precision="bf16", channels_last=True
    ),
)
tiny = Recipe(
    model=BFSPRConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        attention_dropout=0.0,
        max_tokens=48,
        projection_dim=128,
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
        run_dir=Path("quickstart/bfspr"),
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
    torchrun recipes/bfspr_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("bfspr_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "BFSPR on MIMIC-CXR.")
