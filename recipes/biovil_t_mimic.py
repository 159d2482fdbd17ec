"""BioViL-T on MIMIC-CXR (Bannur et al., CVPR 2023).

    torchrun --nproc-per-node 8 recipes/biovil_t_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/biovil_t_mimic.py tiny           # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/biovil_t_mimic.py tiny --help    # every setting

An image is trained with the patient's previous one, where the shards have the order of the studies. Preset `paper`: the
released model's sizes. The training code was not released: texts, optimiser, augmentation, batch, epochs and weights
of the losses are not confirmed. Differences from the paper: bf16 autocast; masked words are predicted without the
image; ImageNet's ResNet-50 and CXR-BERT as it was released with BioViL.

Preset `tiny`: a ResNet-10 and a three-layer BERT from scratch, as `recipes/biovil_mimic.py tiny`, with complete
reports, and a pooler of one block and 128 dimensions.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, WholeText
from medvl.models import BioViLTConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: BioViLTConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of a BioViL-T, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=BioViLTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=WholeText(),
        image=ConVIRTAugmentation.weak(448),
    ),
    optim=OptimConfig(optimizer="adamw", lr=2e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=1000)),
    train=TrainConfig(
        run_dir=Path("runs/biovil-t-mimic"),
        epochs=50,
        global_batch=512,
        precision="bf16",
        channels_last=True,
        packed_text=True,
    ),
)
tiny = Recipe(
    model=BioViLTConfig(
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
    pretrained=False,
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=WholeText(),
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/biovil-t"),
        epochs=14,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        packed_text=True,
        validate_every=250,
        checkpoint_every=250,
        best_metric="zero_shot/auroc_macro_competition",
        best_mode="max",
    ),
)
PRESETS = {"paper": paper, "tiny": tiny}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr --short-side 512
and then
    torchrun recipes/biovil_t_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("biovil_t_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "BioViL-T on MIMIC-CXR.")
