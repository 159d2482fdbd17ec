"""UMRL on MIMIC-CXR (Hsu et al., arXiv 1811.08615, ML4H 2018).

    torchrun recipes/umrl_mimic.py --data.train DIR/train --data.valid DIR/validate \\
        --data.tokenizer VOCAB
    # averaged word vectors, not TF-IDF
    torchrun recipes/umrl_mimic.py --model.text-weights glove.6B.300d.txt ...
    torchrun recipes/umrl_mimic.py --model.text-encoder bioclinicalbert ...  # paragraph vectors
    torchrun recipes/umrl_mimic.py --model.text-encoder bioclinicalbert \\
        --model.text-unit sentence ...
    torchrun recipes/umrl_mimic.py --model.paired-share 0.01 ...  # EA+Adv with 1 % of the pairs
    # EA alone
    torchrun recipes/umrl_mimic.py --model.adversarial-weight 0 --model.paired-share 0.01 ...
    torchrun recipes/umrl_mimic.py tiny  # data of `medvl phantom quickstart`, two CPU cores

With `--model.text-encoder static` and no `--model.text-weights`, TF-IDF and PCA are fitted to the
training texts before the first step, and are in every checkpoint. The encoders are frozen. Their
features are not stored but computed anew in every step: an epoch costs a pass of both encoders,
without their backward pass.

Preset `paper`: ImageNet's DenseNet-121. The paper's image weights, optimiser, batch and sizes are
not known here.

Preset `tiny`: the image encoder of `quickstart/convirt/best` (`medvl train convirt tiny`), because
frozen features of a random encoder carry little.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import medvl
from medvl.data import EvalTransform, ShardSource, WholeText
from medvl.eval import ZeroShotEval
from medvl.models import UMRLConfig, copy_training, fit_tfidf
from medvl.train import (
    DataConfig,
    OptimConfig,
    Run,
    TrainConfig,
    ZeroShotRecipe,
    launch,
    quickstart,
    zero_shot_run,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(ZeroShotRecipe):
    """All settings of a run."""

    image_from: Path | None = None
    """Checkpoint of any system whose image encoder is taken."""


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
    train=TrainConfig(
        run_dir=Path("runs/umrl-mimic"), epochs=10, global_batch=256, precision="bf16"
    ),
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
    data=dataclasses.replace(quickstart.DATA, image=EvalTransform(size=112, fit="squash")),
    optim=OptimConfig(optimizer="adam", lr=3e-3),
    train=dataclasses.replace(
        quickstart.TRAIN,
        run_dir=Path("quickstart/umrl"),
        epochs=8,
        scale_below=8 * quickstart.SCALED,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --views PA AP --out shards/mimic-cxr
    medvl vocab --data shards/mimic-cxr/train --out shards/mimic-cxr/vocab"""
prepared = zero_shot_run("umrl_mimic", MAKE_DATA, ZeroShotEval)


def start(model: Any, recipe: Recipe) -> None:
    """Take the image encoder of another checkpoint, and fit TF-IDF and PCA to the training
    texts.
    """
    if recipe.image_from is not None:
        encoder: Any = medvl.load(recipe.image_from).image_encoder
        model.image_encoder.load_state_dict(encoder.state_dict())
        copy_training(encoder, model.image_encoder)
    if model.text_encoder.name == "static" and recipe.model.text_weights is None:
        source = ShardSource(recipe.data.train)
        rng = np.random.default_rng(0)
        samples = range(len(source))
        fit_tfidf(
            model.text_encoder,
            model.tokenizer,
            lambda: (
                recipe.data.text(source.sample(position).sections, rng) for position in samples
            ),
        )


def prepare(recipe: Recipe) -> Run:
    """Create the model, the loaders and the evaluator."""
    run = prepared(recipe)
    if recipe.init_from is None:
        start(run.model, recipe)
    return run


if __name__ == "__main__":
    launch(prepare, PRESETS, "UMRL on MIMIC-CXR.")
