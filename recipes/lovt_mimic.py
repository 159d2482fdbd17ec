"""LoVT on MIMIC-CXR (Mueller et al., arXiv 2112.02889, ECCV 2022).

    torchrun --nproc-per-node 8 recipes/lovt_mimic.py --data.train DIR/train --data.valid DIR/validate
    torchrun recipes/lovt_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores
    torchrun recipes/lovt_mimic.py analysis        # without local negatives (arXiv 2211.07254); `analysis-tiny`
    torchrun recipes/lovt_mimic.py tiny --help     # every setting

Preset `paper`: the authors' configuration LoVT_100: findings and impression with swapped sentences, ConVIRT's
augmentation, ImageNet's ResNet-50 and Bio_ClinicalBERT from the hub on first use. Updates have 16 micro-batches of 32
pairs, whose negatives are the other 31. Differences: sentences are split by medvl, not by stanza; bf16 autocast for
fp16; one cosine over the run, where the released code's rate falls over one epoch and rises again over the next.
Images are frontal, as published: make the shards with `--views PA AP`, because the preset reads all images of its
shards. Preset `analysis` has the same data and optimiser; its paper's were not available.

Presets `tiny` and `analysis-tiny`: a ResNet-10 and a three-layer BERT from scratch, whose last stage keeps the stride
so that images of 112 pixels have 7 x 7 regions as published, a weaker augmentation without the flip, and a higher rate.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.data import ConVIRTAugmentation, SwappedSentences
from medvl.models import LocalAnalysisConfig, LoVTConfig
from medvl.train import Cosine, DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: LoVTConfig | LocalAnalysisConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of a LoVT, or the encoders of another system."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=LoVTConfig(),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        text=SwappedSentences(min_tokens=3, swap_probability=0.6),
        image=ConVIRTAugmentation(size=224, flip="plain"),
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-4, weight_decay=1e-6, schedule=Cosine()),
    train=TrainConfig(
        run_dir=Path("runs/lovt-mimic"),
        epochs=100,
        global_batch=512,
        accumulate=16,
        precision="bf16",
        channels_last=True,
        early_stop_patience=10,
    ),
)
SMALL: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {"output_stride": 16},
    "text_encoder": "tiny_bert",
    "image_size": 112,
    "fit": "squash",
    "projection_dim": 128,
    "hidden_dim": 512,
    "frozen_text_layers": 0,
    "attention_dropout": 0.0,
    "max_tokens": 256,
}
tiny = Recipe(
    model=LoVTConfig(**SMALL),
    pretrained=False,
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=SwappedSentences(),
        image=ConVIRTAugmentation.weak(112),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/lovt"),
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
analysis = dataclasses.replace(
    paper,
    model=LocalAnalysisConfig(),
    train=dataclasses.replace(paper.train, run_dir=Path("runs/local-analysis-mimic")),
)
analysis_tiny = dataclasses.replace(
    tiny,
    model=LocalAnalysisConfig(**SMALL),
    train=dataclasses.replace(tiny.train, run_dir=Path("quickstart/local-analysis")),
)

PRESETS = {"paper": paper, "tiny": tiny, "analysis": analysis, "analysis-tiny": analysis_tiny}

MAKE_DATA = """Make the shards first. From MIMIC-CXR on disk:
    medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
and then
    torchrun recipes/lovt_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("lovt_mimic", recipe, recipe.init_from)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "LoVT on MIMIC-CXR.")
