"""ConVIRT on MIMIC-CXR (Zhang et al., arXiv 2010.00747, MLHC 2022).

    torchrun --nproc-per-node 8 recipes/convirt_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/convirt_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/convirt_mimic.py tiny --help     # every setting
    torchrun recipes/convirt_mimic.py --init-from runs/convirt-mimic/best --data.train OURS/train ...    # continue

Preset `paper`: the settings of the paper where it gives them, else those of LoVT's re-implementation. ImageNet's
ResNet-50 and Bio_ClinicalBERT are downloaded from the hub on first use. Differences from the paper: bf16 autocast, and
an epoch is a pass over the training set (5,000 steps in the paper). Images are frontal, as published: make the shards
with `--views PA AP`, because the preset reads all images of its shards. The authors released neither weights nor a
zero-shot result on CheXpert; results of this recipe need the credentialed data.

Preset `tiny`: a ResNet-10 and a three-layer BERT from scratch, complete impressions instead of single sentences, a
weaker augmentation without the flip, and AdamW with a cosine schedule instead of Adam on a plateau.
`bash scripts/quickstart.sh` trains it in about five minutes on two cores. For held-out phantom patients the mean AUROC
of the five competition findings was 0.894 [0.880, 0.907].
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, RandomSentence, WholeText
from medvl.models import ConVIRTConfig
from medvl.train import Cosine, DataConfig, OptimConfig, Plateau, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: ConVIRTConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of a ConVIRT, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=ConVIRTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=RandomSentence(min_tokens=3),
        image=ConVIRTAugmentation(size=224, flip="plain"),
    ),
    optim=OptimConfig(optimizer="adam", lr=1e-4, weight_decay=1e-6, schedule=Plateau(factor=0.5, patience=12)),
    train=TrainConfig(
        run_dir=Path("runs/convirt-mimic"),
        epochs=200,
        global_batch=32,
        precision="bf16",
        channels_last=True,
        early_stop_patience=15,
    ),
)
# With encoders from scratch and about 5,000 pairs, complete impressions carry more information per step than single
# sentences, and a strong augmentation would slow down learning.
tiny = Recipe(
    model=ConVIRTConfig(
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        image_size=112,
        fit="squash",
        projection_dim=128,
        frozen_text_layers=0,
        attention_dropout=0.0,
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
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/convirt"),
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
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
and then
    torchrun recipes/convirt_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("convirt_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "ConVIRT on MIMIC-CXR.")
