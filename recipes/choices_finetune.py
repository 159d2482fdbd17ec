"""Multiple choice: scores of the options of a question by a fusion-encoder, on ReXVQA.

    medvl shards rexvqa --root ReXVQA --images ReXGradient --out shards/rexvqa
    torchrun --nproc-per-node 8 recipes/choices_finetune.py --init-from runs/m3ae/best
    # the phantom, from the demo's encoders, one CPU core; prints how to make its data
    torchrun recipes/choices_finetune.py tiny
    torchrun recipes/choices_finetune.py tiny --help-all    # every setting
    medvl eval multiple-choice --checkpoint quickstart/choices-run/best \\
        --data quickstart/choices/test --train quickstart/choices/train
    # 664 questions, one seed: 0.745 [0.708, 0.782]; text only 0.250 [0.211, 0.289], noise 0.250,
    # images swapped 0.248 [0.217, 0.287], in other words 0.369 [0.326, 0.408]

Each option behind its question is a text. It is fused with the image, and the matching head scores
it; the loss is the cross-entropy over the options of a question. Scores do not depend on the order
of the options.

Where all options are among a few answers, as in the phantom, a classifier over these learns faster:
`recipes/vqa_finetune.py tiny --init-from demo` on the same data has 0.852 [0.820, 0.884] after 450
steps; text only 0.250, images swapped 0.235. Options of ReXVQA or PMC-VQA are seldom in
such a list.

All weights of a fusion-encoder's checkpoint are used; of a dual-encoder's, the image and text
encoder, with a new fusion-encoder of the sizes in `fusion`.

Preset `paper`: M3AE, with the rates of its fine-tuning for retrieval (Chen et al., arXiv
2209.07098), which also scores texts with the matching head; no paper has this combination.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.data import ConVIRTAugmentation, EvalTransform
from medvl.models import DualStreamConfig
from medvl.train import (
    Cosine,
    Linear,
    OptimConfig,
    TrainConfig,
    VQADataConfig,
    launch,
    quickstart,
)

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    init_from: Path
    """Checkpoint to start from."""
    fusion: DualStreamConfig
    """Sizes of a new fusion-encoder, used where `init_from` is a dual-encoder."""
    max_tokens: int | None = None
    """Maximum length of a question with an option; None is that of `init_from`."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is 5."""
    data: VQADataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    init_from=Path("runs/m3ae/best"),
    fusion=DualStreamConfig(),
    max_tokens=64,
    data=VQADataConfig(
        train=Path("shards/rexvqa/train"),
        valid=Path("shards/rexvqa/validate"),
        image=EvalTransform(size=384),
    ),
    optim=OptimConfig(
        lr=5e-6, weight_decay=0.01, betas=(0.9, 0.98), schedule=Linear(warmup_steps=1000)
    ),
    train=TrainConfig(
        run_dir=Path("runs/choices"),
        epochs=3,
        global_batch=256,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="loss",
        best_mode="min",
    ),
)
tiny = Recipe(
    init_from=Path("demo"),
    fusion=DualStreamConfig(
        image_arguments={},
        width=128,
        layers=1,
        heads=2,
        intermediate=512,
        image_positions=True,
        fusion_lr_mult=2.0,
    ),
    data=VQADataConfig(
        train=Path("quickstart/choices/train"),
        valid=Path("quickstart/choices/validate"),
        image=dataclasses.replace(ConVIRTAugmentation.weak(112), area=(0.8, 1.0)),
        together=4,
        workers=1,
    ),
    optim=OptimConfig(lr=2e-4, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=50)),
    train=dataclasses.replace(
        paper.train,
        run_dir=Path("quickstart/choices-run"),
        epochs=8,
        global_batch=64,
        channels_last=True,
        validate_every=150,
        checkpoint_every=150,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny}

MAKE_DATA = f"""Make the shards first. From ReXVQA on disk:
    medvl shards rexvqa --root ReXVQA --images ReXGradient --out shards/rexvqa
Without any data, on the phantom corpus:
    {quickstart.CHOICE_SHARDS}
    medvl train choices tiny"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model and the loaders."""
    recipe.data.check(MAKE_DATA)
    from medvl.models import create_choices
    from medvl.train import Run, open_choices, seeded

    with seeded(recipe.train.seed):
        model = create_choices(
            recipe.init_from,
            fusion=recipe.fusion,
            image_size=recipe.data.image.size,
            max_tokens=recipe.max_tokens,
            head_lr_mult=recipe.head_lr_mult,
        )
    opened = open_choices(recipe.data, model, recipe.train.micro_batch)
    return Run(recipe="choices_finetune", settings=recipe, model=model, data=opened)


if __name__ == "__main__":
    launch(prepare, PRESETS, "Multiple choice.")
