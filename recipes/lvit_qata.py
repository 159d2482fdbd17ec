"""LViT: masks from images and their texts (Li et al., arXiv 2206.14718), on QaTa-COV19.

    torchrun recipes/lvit_qata.py                                  # published settings
    torchrun recipes/lvit_qata.py --model.text off                 # without text
    torchrun recipes/lvit_qata.py --model.network unet  # the U-Net of the paper's comparison
    # after a U-Net, as the authors' pretraining
    torchrun recipes/lvit_qata.py --init-from runs/lvit-unet/best
    torchrun recipes/lvit_qata.py --data.fraction 0.25 --data.unlabelled True \\
        --model.labelled-steps 2000
    torchrun recipes/lvit_qata.py tiny                             # phantom corpus, two CPU cores
    medvl eval segmentation --checkpoint runs/lvit-qata/best --data shards/qata/test \\
        --valid shards/qata/validate \\
        --empty lvit

`paper` follows the released configuration for Covid19: 224 pixels, Adam at 3e-4, cosine restarts
every ten epochs down to 1e-4, patience of 50 epochs. Its batch of 24 is what the authors name for
QaTa-COV19 (issue 37 of their repository; the configuration says 2). Differences: validation Dice is
at the best threshold instead of 0.5; where an image is flipped, left and right are exchanged in its
text, and other turns are left to texts that name no place (published: `--data.image.flip plain`).
The first ten words of a text are read, as published; `--model.words 24` reads the places of long
descriptions too. With `--data.fraction`, the images of the other patients are unlabelled if
`--data.unlabelled`.

The texts were written from the masks and name their places. Compare with the Dice under other
texts, which `medvl eval segmentation` prints, and `scripts/compare_segmentation.py` for the three
networks on one corpus. LViT takes part in no run of `medvl benchmark`.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import LViTAugmentation
from medvl.models import LViTConfig
from medvl.train import CosineRestarts, DenseDataConfig, OptimConfig, TrainConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: LViTConfig
    text_pretrained: bool
    """Take the published weights and the tokenizer of the text encoder."""
    init_from: Path | None = None
    """Checkpoint of LViT or of its U-Net whose weights of the same names and shapes are taken, as
    the authors' pretraining with a U-Net does.
    """
    tokenizer: Path | None = None
    """Folder of a tokenizer; None takes the text encoder's own from the hub."""
    data: DenseDataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    model=LViTConfig(labels=("Infection",)),
    text_pretrained=True,
    data=DenseDataConfig(
        train=Path("shards/qata/train"),
        valid=Path("shards/qata/validate"),
        image=LViTAugmentation(size=224),
    ),
    optim=OptimConfig(optimizer="adam", lr=3e-4, schedule=CosineRestarts(epochs=10, min_lr=1e-4)),
    train=TrainConfig(
        run_dir=Path("runs/lvit-qata"),
        epochs=2000,
        global_batch=24,
        precision="bf16",
        seed=666,
        best_metric="segmentation/dice",
        best_mode="max",
        early_stop_patience=50,
    ),
)
tiny = Recipe(
    model=dataclasses.replace(
        paper.model,
        image_size=64,
        width=8,
        words=24,
        text_encoder="tiny_bert",
        frozen_text=False,
    ),
    text_pretrained=False,
    tokenizer=Path("quickstart/qata-vocab"),
    data=dataclasses.replace(
        paper.data,
        train=Path("quickstart/qata/train"),
        valid=Path("quickstart/qata/validate"),
        image=LViTAugmentation(size=64, turns=False, rotation=10),
        workers=1,
    ),
    optim=OptimConfig(optimizer="adam", lr=3e-3, schedule=CosineRestarts(epochs=10, min_lr=1e-4)),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("quickstart/lvit"),
        epochs=40,
        global_batch=8,
        seed=0,
        precision="fp32",
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}

MAKE_DATA = """Make the shards first:
    medvl shards qata --root QATA --out shards/qata
Without any data, on the phantom corpus:
    medvl phantom qata --out phantom-qata --patients 700 --size 160
    medvl shards qata --root phantom-qata --out quickstart/qata --short-side 112
    medvl vocab --data quickstart/qata/train --out quickstart/qata-vocab
    medvl train lvit tiny"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    import medvl
    from medvl.eval import SegmentationEval
    from medvl.models import copy_training
    from medvl.train import Run, open_dense, seeded

    recipe.data.names("masks")
    model = dataclasses.replace(recipe.model, unlabelled=recipe.data.unlabelled_images("masks"))
    tokenizer, published = (
        (recipe.tokenizer, recipe.text_pretrained) if model.reads_text else (None, False)
    )
    with seeded(recipe.train.seed):
        created = medvl.create_model(model, pretrained=published, tokenizer=tokenizer)
    if recipe.init_from is not None:
        own = created.state_dict()
        start = medvl.load(recipe.init_from)
        fitting = {
            name: x
            for name, x in start.state_dict().items()
            if name in own and own[name].shape == x.shape
        }
        created.load_state_dict(own | fitting)
        copy_training(start, created)
    opened = open_dense(recipe.data, created, "masks", recipe.train.micro_batch)
    run = Run(recipe="lvit_qata", settings=recipe, model=created, data=opened)
    return run.with_evaluator(lambda images: SegmentationEval(images, empty="lvit"))


if __name__ == "__main__":
    launch(prepare, PRESETS, "LViT on QaTa-COV19.")
