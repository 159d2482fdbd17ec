"""UMRL on MIMIC-CXR (Hsu et al., arXiv 1811.08615, ML4H 2018).

    torchrun recipes/umrl_mimic.py --data.train DIR/train --data.valid DIR/validate --data.tokenizer VOCAB
    torchrun recipes/umrl_mimic.py --model.text-weights glove.6B.300d.txt ...      # averaged word vectors, not TF-IDF
    torchrun recipes/umrl_mimic.py --model.text-encoder bioclinicalbert ...        # paragraph vectors
    torchrun recipes/umrl_mimic.py --model.paired-share 0.01 ...                   # EA+Adv with 1 % of the pairs
    torchrun recipes/umrl_mimic.py --model.adversarial-weight 0 --model.paired-share 0.01 ...    # EA alone
    torchrun recipes/umrl_mimic.py tiny            # phantom corpus of scripts/quickstart.sh, two CPU cores

With `--model.text-encoder static` and no `--model.text-weights`, TF-IDF and PCA are fitted to the training texts before
the first step, and are in every checkpoint. The encoders are frozen. Their features are not stored but computed anew
in every step: an epoch costs a pass of both encoders, without their backward pass.

Preset `paper`: ImageNet's DenseNet-121. The paper's image weights, optimiser, batch and sizes are not known here.

Preset `tiny`: the image encoder of `quickstart/convirt/best` from `scripts/quickstart.sh`, because frozen features of a
random encoder carry little.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import medvl
from medvl.data import EvalTransform, ShardSource, WholeText
from medvl.models import UMRLConfig, fit_tfidf
from medvl.train import DataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: UMRLConfig
    pretrained: bool
    """Start both encoders from their published weights."""
    init_from: Path | None = None
    """Checkpoint to start from: all weights of a UMRL, or the encoders of another system."""
    image_from: Path | None = None
    """Checkpoint of any system whose image encoder is taken."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


paper = Recipe(
    model=UMRLConfig(max_tokens=256),
    pretrained=True,
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        tokenizer=Path("shards/mimic-cxr/vocab"),
        text=WholeText(),
        image=EvalTransform(size=224),
    ),
    optim=OptimConfig(optimizer="adam", lr=1e-3),
    train=TrainConfig(run_dir=Path("runs/umrl-mimic"), epochs=10, global_batch=256, precision="bf16"),
)
tiny = Recipe(
    model=UMRLConfig(
        image_encoder="resnet_tiny",
        image_size=112,
        fit="squash",
        text_arguments={"dimension": 128},
        projection_dim=64,
        max_tokens=48,
    ),
    pretrained=False,
    image_from=Path("quickstart/convirt/best"),
    data=DataConfig(
        train="quickstart/shards/train",
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        text=WholeText(sections=("impression",)),
        image=EvalTransform(size=112, fit="squash"),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adam", lr=3e-3),
    train=TrainConfig(
        run_dir=Path("quickstart/umrl"),
        epochs=8,
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
    torchrun recipes/umrl_mimic.py --data.train shards/mimic-cxr/train --data.valid shards/mimic-cxr/validate
Without any data, on the phantom corpus:
    bash scripts/quickstart.sh"""


def start(model: Any, recipe: Recipe) -> None:
    """Take the image encoder of another checkpoint, and fit TF-IDF and PCA to the training texts."""
    if recipe.image_from is not None:
        encoder: Any = medvl.load(recipe.image_from).image_encoder
        model.image_encoder.load_state_dict(encoder.state_dict())
        model.image_encoder.trained_on = encoder.trained_on
    if model.text_encoder.name == "static" and recipe.model.text_weights is None:
        source, rng = ShardSource(recipe.data.train), np.random.default_rng(0)
        samples = range(len(source))
        fit_tfidf(
            model.text_encoder,
            model.tokenizer,
            lambda: (recipe.data.text(source.sample(position).sections, rng) for position in samples),
        )


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ZeroShotEval
    from medvl.train import pretraining

    run = pretraining("umrl_mimic", recipe, recipe.init_from)
    if recipe.init_from is None:
        start(run.model, recipe)
    prompts = recipe.prompts
    return run if prompts is None else run.with_evaluator(lambda images: ZeroShotEval(images, prompts))


if __name__ == "__main__":
    launch(prepare, PRESETS, "UMRL on MIMIC-CXR.")
