"""BERTHop on the findings of Open-i (Monajatipoor et al., arXiv 2108.04938, MICCAI 2022).

    medvl fit-pixelhop --data shards/openi/train --out pixelhop
    torchrun recipes/berthop_openi.py --pixelhop pixelhop
    torchrun recipes/berthop_openi.py --pixelhop pixelhop --modalities image --data.fraction 0.1
    torchrun recipes/berthop_openi.py tiny            # the phantom, two CPU cores
    torchrun recipes/berthop_openi.py tiny --help-all     # every setting
    python scripts/compare_berthop.py  # beside a ResNet, at 1, 10 and 100 % of the labels

The visual tokens come from PixelHop++, fitted to the training images without gradients; BlueBERT is
fine-tuned over the report and the tokens. `--init-from` starts from a BERTHop, such as one that was
trained by masked words before.

Preset `paper`: batch 18, 128 tokens, 1e-4 under a linear schedule with a warm-up of a tenth, as in
the released
notebook, for 6 epochs. Differences: validation patients of their own select the checkpoint; AdamW
instead of BertAdam; the settings of PixelHop++ are those of `medvl fit-pixelhop`, because the
paper's are not released.
"""

import dataclasses
from pathlib import Path

from medvl.encoders import pixelhop_arguments
from medvl.eval import ClassifyEval, LabelPolicy
from medvl.models import BERTHopConfig
from medvl.train import (
    ClassificationDataConfig,
    ClassifierRecipe,
    Linear,
    OptimConfig,
    TrainConfig,
    classifier_run,
    launch,
    quickstart,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BERTHopRecipe(ClassifierRecipe):
    """All settings of a run."""

    pixelhop: Path
    """Folder of `medvl fit-pixelhop`; used without `init_from`."""


paper = BERTHopRecipe(
    pixelhop=Path("pixelhop"),
    model=BERTHopConfig(),
    pretrained=True,
    data=ClassificationDataConfig(
        train=Path("shards/openi/train"), valid=Path("shards/openi/validate")
    ),
    optim=OptimConfig(lr=1e-4, weight_decay=0.01, schedule=Linear(warmup_steps=96)),
    train=TrainConfig(
        run_dir=Path("runs/berthop"),
        epochs=6,
        global_batch=18,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="classify/auroc_macro",
        best_mode="max",
    ),
)
tiny = BERTHopRecipe(
    pixelhop=Path("quickstart/pixelhop"),
    model=BERTHopConfig(
        text_encoder="tiny_bert",
        text_arguments={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        image_size=112,
        fit="squash",
        max_tokens=64,
    ),
    tokenizer=Path("quickstart/vocab"),
    data=ClassificationDataConfig(
        train=Path("quickstart/openi-shards/train"),
        valid=Path("quickstart/openi-shards/validate"),
        workers=1,
    ),
    optim=dataclasses.replace(quickstart.OPTIM, lr=5e-4),
    train=dataclasses.replace(
        paper.train, run_dir=Path("quickstart/berthop"), epochs=12, global_batch=32
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """medvl shards openi --root OPENI --views FRONTAL --out shards/openi
    medvl fit-pixelhop --data shards/openi/train --out pixelhop"""
PHANTOM = """medvl phantom quickstart
    medvl phantom openi --out quickstart/openi --patients 1200 --size 160
    medvl shards openi --root quickstart/openi --out quickstart/openi-shards --views FRONTAL --short-side 160
    medvl fit-pixelhop --data quickstart/openi-shards/train --out quickstart/pixelhop --image-size 112 --fit squash"""


def with_pixelhop(recipe: BERTHopRecipe) -> BERTHopRecipe:
    """Return the settings with the fitted encoder."""
    if recipe.init_from is not None:
        return recipe
    model = dataclasses.replace(
        recipe.model,
        image_arguments=pixelhop_arguments(recipe.pixelhop),
        image_weights=str(recipe.pixelhop),
    )
    return dataclasses.replace(recipe, model=model)


prepare = classifier_run(
    "berthop_openi", MAKE_DATA, LabelPolicy, ClassifyEval, PHANTOM, with_pixelhop
)

if __name__ == "__main__":
    launch(prepare, PRESETS, "BERTHop on Open-i.")
