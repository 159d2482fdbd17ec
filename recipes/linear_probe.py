"""A classifier of findings on a pretrained image encoder: linear probe or fine-tuning, at a
fraction of the labels.

    # the encoder frozen, one linear layer
    torchrun recipes/linear_probe.py --init-from runs/convirt-mimic/best
    torchrun recipes/linear_probe.py finetune --init-from runs/convirt-mimic/best \\
        --data.fraction 0.01
    torchrun recipes/linear_probe.py tiny  # the quickstart's ConVIRT, two CPU cores
    medvl eval classify --checkpoint runs/linear-probe/best --data shards/chexpert/test \\
        --valid shards/chexpert/valid

`--init-from` is a checkpoint of any system with an image encoder, or the name of an encoder with
published weights; with `--image-weights FILE`, of an encoder with weights of your own, and
`--image-arguments mean 0.5 std 0.5` if needed. Images have the encoder's own size and fit.
`--data.fraction` selects a fraction of the training patients by the seed `--data.fraction-seed`.

Preset `paper`: linear classification on CheXpert with the settings of MGCA's released code: AdamW
at a constant 5e-4, weight decay 1e-6, batch 48, uncertain labels by class, at most 50 epochs,
`best` and stopping (patience 10) by the validation loss, the encoder frozen and in eval mode.
Differences: no augmentation (MGCA crops at random, jitters, blurs and mirrors), the linear layer
begins at zero, and fractions and validation are of patients (there of images).

Preset `finetune`: everything is trained, also what a pretraining froze, the encoder at a fifth of
the head's rate, with ConVIRT's augmentation. `best`, the learning rate and stopping follow the
validation AUROC. For probes alone, `medvl eval probe` solves the same problem to its optimum, for
all fractions and draws at once.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.models import EncoderArguments
from medvl.train import (
    ClassificationDataConfig,
    Constant,
    OptimConfig,
    Plateau,
    TrainConfig,
    launch,
)

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    init_from: Path
    """Checkpoint to take the image encoder from, or the name of an image encoder."""
    image_weights: str | None = None
    """Weights of an encoder by name: a file, a folder or OWNER/NAME@COMMIT on the hub; None
    takes the published.
    """
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    """Arguments of an encoder by name, such as `mean 0.5 std 0.5 pad_type same`."""
    frozen_encoder: bool
    """Train the linear layer alone."""
    head_lr_mult: float = 1.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore"
    """Treatment of uncertain labels (-1)."""
    missing: Literal["ignore", "negative"] = "negative"
    """Treatment of missing labels."""
    data: ClassificationDataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    init_from=Path("runs/convirt-mimic/best"),
    frozen_encoder=True,
    data=ClassificationDataConfig(
        train=Path("shards/chexpert/train"),
        valid=Path("shards/chexpert/valid"),
        labels=("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion"),
    ),
    uncertain="per_class",
    optim=OptimConfig(lr=5e-4, weight_decay=1e-6, schedule=Constant()),
    train=TrainConfig(
        run_dir=Path("runs/linear-probe"),
        epochs=50,
        global_batch=48,
        precision="bf16",
        early_stop_patience=10,
    ),
)
_by_auroc = dataclasses.replace(paper.train, best_metric="classify/auroc_macro", best_mode="max")
finetune = dataclasses.replace(
    paper,
    frozen_encoder=False,
    head_lr_mult=5.0,
    data=dataclasses.replace(paper.data, augment=True),
    uncertain="ignore",
    optim=OptimConfig(lr=1e-4, weight_decay=1e-6, schedule=Plateau(factor=0.5, patience=5)),
    train=dataclasses.replace(_by_auroc, run_dir=Path("runs/finetune")),
)
tiny = dataclasses.replace(
    paper,
    init_from=Path("quickstart/convirt/best"),
    data=ClassificationDataConfig(
        train=Path("quickstart/shards/train"),
        valid=Path("quickstart/shards/validate"),
        workers=1,
    ),
    optim=OptimConfig(lr=1e-2, weight_decay=1e-4, schedule=Plateau(factor=0.5, patience=2)),
    uncertain="ignore",
    train=dataclasses.replace(
        _by_auroc, run_dir=Path("quickstart/linear-probe"), epochs=10, early_stop_patience=4
    ),
)

PRESETS = {"paper": paper, "finetune": finetune, "tiny": tiny}

MAKE_DATA = """Make the shards first. From CheXpert, RSNA, SIIM, NIH ChestX-ray14, COVIDx or a table of your own:
    medvl shards chexpert --root CheXpert-v1.0-small --out shards/chexpert
and then, on the encoder of a checkpoint,
    torchrun recipes/linear_probe.py --init-from runs/convirt-mimic/best
Without any data, on the phantom corpus:
    medvl phantom quickstart
    medvl train convirt tiny
    medvl train linear-probe tiny"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import ClassifyEval, LabelPolicy
    from medvl.models import create_classifier
    from medvl.train import Run, open_classification, seeded

    policy = LabelPolicy(uncertain=recipe.uncertain, missing=recipe.missing)
    with seeded(recipe.train.seed):
        model = create_classifier(
            recipe.init_from,
            recipe.data.names(),
            image_weights=recipe.image_weights,
            image_arguments=recipe.image_arguments,
            frozen_encoder=recipe.frozen_encoder,
            head_lr_mult=recipe.head_lr_mult,
        )
    opened = open_classification(recipe.data, model, policy.apply, recipe.train.micro_batch)
    run = Run(recipe="linear_probe", settings=recipe, model=model, data=opened)
    return run.with_evaluator(lambda images: ClassifyEval(images, policy=policy))


if __name__ == "__main__":
    launch(prepare, PRESETS, "Linear probe and fine-tuning.")
