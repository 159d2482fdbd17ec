"""Image-text retrieval: fine-tuning of a fusion-encoder's matching against false texts (METER;
M3AE, arXiv 2209.07098).

    torchrun --nproc-per-node 8 recipes/retrieval_finetune.py --init-from runs/m3ae/best
    # the phantom, from the quickstart's MedViLL, two CPU cores
    torchrun recipes/retrieval_finetune.py tiny
    torchrun recipes/retrieval_finetune.py tiny --help-all     # every setting
    medvl eval retrieval --checkpoint runs/convirt/best --rerank runs/retrieval/best \\
        --data shards/roco/test

Preset `paper`: M3AE on ROCO: 15 false texts for each image, softmax over 16, batch 256, 10 epochs,
5e-6 under a linear schedule with a warm-up of a tenth, fusion-encoder and head at 5 times that
rate, texts of 40 tokens. Differences: false texts are those of the batch of a device, so that a
device needs 16 pairs or more; `best` has the lowest validation loss.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, RandomSection
from medvl.train import DataConfig, Linear, OptimConfig, TrainConfig, launch, quickstart

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    init_from: Path
    """Checkpoint of a fusion-encoder, or of a head on one."""
    negatives: int = 15
    """False texts for each image."""
    max_tokens: int | None = None
    """Maximum length of a text; None is that of the checkpoint."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is 5."""
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    init_from=Path("runs/m3ae/best"),
    max_tokens=40,
    data=DataConfig(
        train="shards/roco/train",
        valid=Path("shards/roco/validation"),
        text=RandomSection(),
        image=ConVIRTAugmentation.crop(384, area=(0.9, 1.0)),
    ),
    optim=OptimConfig(
        lr=5e-6, weight_decay=0.01, betas=(0.9, 0.98), schedule=Linear(warmup_steps=256)
    ),
    train=TrainConfig(
        run_dir=Path("runs/retrieval"),
        epochs=10,
        global_batch=256,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="loss",
        best_mode="min",
    ),
)
tiny = Recipe(
    init_from=Path("quickstart/medvill/best"),
    data=dataclasses.replace(quickstart.DATA, valid_batch=32),
    optim=dataclasses.replace(quickstart.OPTIM, lr=1e-4),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("quickstart/retrieval"),
        epochs=2,
        global_batch=32,
        channels_last=True,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}
MAKE_DATA = """Make the shards first:
    medvl shards roco --root ROCO --splits repaired --out shards/roco
Without any data, on the phantom corpus:
    medvl phantom quickstart
    medvl train convirt tiny
    medvl train medvill tiny
    medvl train retrieval tiny"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model and the loaders."""
    recipe.data.check(MAKE_DATA)
    from medvl.models import create_retrieval
    from medvl.train import Run, open_data, seeded

    with seeded(recipe.train.seed):
        model = create_retrieval(
            recipe.init_from,
            image_size=recipe.data.image.size,
            max_tokens=recipe.max_tokens,
            negatives=recipe.negatives,
            head_lr_mult=recipe.head_lr_mult,
        )
    opened = open_data(recipe.data, model, recipe.train.micro_batch)
    return Run(recipe="retrieval_finetune", settings=recipe, model=model, data=opened)


if __name__ == "__main__":
    launch(prepare, PRESETS, "Image-text retrieval.")
