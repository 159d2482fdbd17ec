"""A classifier of change between an image and its prior image, fine-tuned on a dual-encoder such as
BioViL-T.

    torchrun recipes/change_finetune.py --init-from runs/biovil-t-mimic/best
    # the image alone
    torchrun recipes/change_finetune.py --init-from runs/biovil-t-mimic/best --use-prior False
    torchrun recipes/change_finetune.py tiny          # on the phantom's BioViL-T, two CPU cores
    medvl eval change --checkpoint runs/change/best --data shards/ms-cxr-t/test

The classes are those of MS-CXR-T: improving, stable and worsening, for each finding. MS-CXR-T has
labels of test images only. Labels for training, such as those that Chest ImaGenome derives from
reports, are read from a table in its layout (`medvl shards ms-cxr-t`). `--init-from` is a
checkpoint of any dual-encoder; one that takes no prior image embeds both images apart.
`--data.fraction` selects a fraction of the training patients.

Preset `paper`: BioViL-T at its published size; for a dual-encoder of another size or with borders
set `--data.image.size` and `--data.image.pad` (an error names the values). All settings of the
training are this recipe's own. Everything that images pass through is trained, also what the
pretraining froze. `best` has the highest macro accuracy on validation patients.

Preset `tiny`: the phantom in the layout of MS-CXR-T.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation
from medvl.train import (
    ChangeDataConfig,
    Cosine,
    OptimConfig,
    TrainConfig,
    data_advice,
    launch,
    quickstart,
)

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    init_from: Path
    """Checkpoint of a dual-encoder."""
    use_prior: bool = True
    """Read the prior image."""
    head_lr_mult: float = 10.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""
    data: ChangeDataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    init_from=Path("runs/biovil-t-mimic/best"),
    data=ChangeDataConfig(
        train=Path("shards/change-train/test"),
        valid=Path("shards/change-valid/test"),
        image=dataclasses.replace(ConVIRTAugmentation.weak(448), flip="plain"),
    ),
    optim=OptimConfig(lr=2e-5, weight_decay=0.01, schedule=Cosine(warmup_steps=200)),
    train=TrainConfig(
        run_dir=Path("runs/change"),
        epochs=20,
        global_batch=64,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="change/macro_accuracy",
        best_mode="max",
    ),
)
tiny = Recipe(
    init_from=Path("quickstart/biovil-t/best"),
    data=ChangeDataConfig(
        train=Path("quickstart/change-train/test"),
        valid=Path("quickstart/change-valid/test"),
        image=dataclasses.replace(ConVIRTAugmentation.weak(112), flip="plain"),
        workers=1,
    ),
    optim=dataclasses.replace(quickstart.OPTIM, lr=5e-4),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("quickstart/change"),
        epochs=6,
        global_batch=32,
        channels_last=True,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = "medvl shards ms-cxr-t --root CHANGE --images MIMIC-CXR-JPG --out shards/change-train"
PHANTOM = """medvl phantom quickstart
    medvl train biovil-t-mimic tiny
    medvl phantom ms-cxr-t --out quickstart/change-train-files --patients 2500 --size 256 --seed 40
    medvl shards ms-cxr-t --root quickstart/change-train-files --out quickstart/change-train --short-side 160
    medvl phantom ms-cxr-t --out quickstart/change-valid-files --patients 300 --size 256 --seed 34
    medvl shards ms-cxr-t --root quickstart/change-valid-files --out quickstart/change-valid --short-side 160"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    advice = data_advice("change_finetune", MAKE_DATA, PHANTOM, recipe.data.own_data)
    recipe.data.check(advice)
    from medvl.eval import ChangeEval
    from medvl.models import create_change_classifier
    from medvl.train import Run, open_change, seeded

    with seeded(recipe.train.seed):
        model = create_change_classifier(
            recipe.init_from,
            recipe.data.names(),
            use_prior=recipe.use_prior,
            head_lr_mult=recipe.head_lr_mult,
        )
    opened = open_change(recipe.data, model, recipe.train.micro_batch)
    run = Run(recipe="change_finetune", settings=recipe, model=model, data=opened)
    return run.with_evaluator(ChangeEval)


if __name__ == "__main__":
    launch(prepare, PRESETS, "Fine-tuning for change between images.")
