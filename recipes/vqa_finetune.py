"""Visual question answering: a classifier over answers, or a decoder of them, fine-tuned from
either family.

    torchrun recipes/vqa_finetune.py --init-from runs/m3ae/best
    torchrun recipes/vqa_finetune.py --init-from runs/albef/best --head ranking \\
        --decoder.alpha 0.4 --optim.lr 2e-5
    # the phantom, from the quickstart's ConVIRT, two CPU cores
    torchrun recipes/vqa_finetune.py tiny
    torchrun recipes/vqa_finetune.py tiny --help-all    # every setting

All weights of a fusion-encoder's checkpoint are used; of a dual-encoder's, the image and text
encoder, with a new fusion-encoder of the sizes in `fusion`. Learned positions of the image are
interpolated to `data.image.size`: 384 pixels, where M3AE was pretrained at 288 and ALBEF at 256.
The answers are those of the training questions (protocol `medvl`); `--protocol` selects another
one, such as a published system's. The vocabularies of `m3ae`, `mumc` and `m2i2` include the test's
answers, which are read from the folders of the other splits beside `data.train`; evaluations state
it. `pubmedclip` cannot be validated here, as it needs predicted answer types, and `llava_med` has
no vocabulary.

Preset `paper`: M3AE on VQA-RAD (Chen et al., arXiv 2209.07098): batch 64, 50 epochs, 5e-6 under a
linear schedule with a warm-up of a tenth, heads at 50 and the fusion-encoder at 5 times that rate.
Its released code chooses the checkpoint on a copy of the test questions; here validation has images
of its own (`--split image-disjoint`).

Preset `difference`: what has changed between two dates of a phantom patient, from the demo's
encoders, in 8 minutes on a busy core. 462 test questions, seeds 0, 1 and 2: 0.494 [0.430, 0.555],
0.489 and 0.498. Trained without the earlier image (`--earlier-image False`), 0.422, 0.418 and
0.426; paired differences 0.071 [0.045, 0.100], 0.071 [0.046, 0.099] and 0.071 [0.049, 0.099]. With
the earlier image of another patient 0.327, 0.325 and 0.323, commonest answer 0.377 (`medvl eval
vqa --controls earlier_removed earlier_swapped`).
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.data import ConVIRTAugmentation, EvalTransform
from medvl.models import DecoderConfig, DualStreamConfig
from medvl.train import Cosine, Linear, OptimConfig, TrainConfig, VQADataConfig, launch

if TYPE_CHECKING:
    from medvl.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    init_from: Path
    """Checkpoint to start from."""
    fusion: DualStreamConfig
    """Sizes of a new fusion-encoder, used where `init_from` is a dual-encoder."""
    head: Literal["classifier", "product", "ranking", "generation"] = "classifier"
    """Or product (MedViLL's own), ranking or generation (a decoder of answers)."""
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """Sizes of the decoder for the heads ranking and generation."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is the published one of
    that head.
    """
    earlier_image: bool = False
    """Read the patient's earlier image as well, for questions about differences."""
    question_prior: bool = False
    """Start from the answers that the words of a question suggest; learn what the image adds."""
    frozen_encoders: bool = False
    """Keep both encoders below the fusion-encoder as they are."""
    protocol: str = "medvl"
    """Comparison of answers, and the questions whose answers are the vocabulary."""
    data: VQADataConfig
    optim: OptimConfig
    train: TrainConfig


paper = Recipe(
    init_from=Path("runs/m3ae/best"),
    fusion=DualStreamConfig(),
    data=VQADataConfig(
        train=Path("shards/vqa-rad/train"),
        valid=Path("shards/vqa-rad/validate"),
        image=EvalTransform(size=384),
    ),
    optim=OptimConfig(
        lr=5e-6, weight_decay=0.01, betas=(0.9, 0.98), schedule=Linear(warmup_steps=240)
    ),
    train=TrainConfig(
        run_dir=Path("runs/vqa-rad"),
        epochs=50,
        global_batch=64,
        precision="bf16",
        find_unused_parameters=True,
        best_metric="vqa/accuracy",
        best_mode="max",
    ),
)
tiny = Recipe(
    init_from=Path("quickstart/convirt/best"),
    fusion=DualStreamConfig(
        image_arguments={},
        width=192,
        layers=2,
        heads=3,
        intermediate=768,
        image_positions=True,
        fusion_lr_mult=2.0,
    ),
    decoder=DecoderConfig(layers=2, heads=3, intermediate=768),
    head_lr_mult=4.0,
    data=VQADataConfig(
        train=Path("quickstart/vqa/train"),
        valid=Path("quickstart/vqa-valid/test"),
        valid_split="test",
        image=dataclasses.replace(ConVIRTAugmentation.weak(112), area=(0.8, 1.0)),
        together=4,
        workers=1,
    ),
    optim=OptimConfig(lr=2e-4, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)),
    train=TrainConfig(
        run_dir=Path("quickstart/vqa-run"),
        epochs=6,
        global_batch=64,
        precision="bf16",
        channels_last=True,
        validate_every=240,
        find_unused_parameters=True,
        best_metric="vqa/accuracy",
        best_mode="max",
    ),
)

difference = dataclasses.replace(
    tiny,
    init_from=Path("demo"),
    earlier_image=True,
    data=dataclasses.replace(
        tiny.data,
        train=Path("quickstart/differences/train"),
        valid=Path("quickstart/differences/validate"),
        valid_split="validate",
        together=1,
    ),
    train=dataclasses.replace(
        tiny.train,
        run_dir=Path("quickstart/difference-run"),
        epochs=None,
        steps=400,
        validate_every=200,
    ),
)

PRESETS = {"paper": paper, "tiny": tiny, "difference": difference}

MAKE_DATA = """Make the shards first. From VQA-RAD on disk:
    medvl shards vqa-rad --root VQA-RAD --split image-disjoint --out shards/vqa-rad
Without any data, on the phantom corpus:
    medvl phantom quickstart
    medvl train convirt tiny
    medvl phantom vqa-rad --out quickstart/vqa-rad --patients 3000 --size 256 --seed 20
    medvl phantom vqa-rad --out quickstart/vqa-rad-valid --patients 400 --size 256 --seed 21
    medvl shards vqa-rad --root quickstart/vqa-rad --out quickstart/vqa --short-side 160
    medvl shards vqa-rad --root quickstart/vqa-rad-valid --out quickstart/vqa-valid --short-side 160
    medvl train vqa tiny
Questions about two dates of a patient, on the phantom corpus:
    medvl phantom diff-vqa --out quickstart/diff-vqa --patients 2600 --size 160
    medvl shards diff-vqa --root quickstart/diff-vqa --kinds difference --out quickstart/differences --short-side 160
    medvl train vqa difference"""


def prepare(recipe: Recipe) -> "Run":
    """Create the model, the loaders and the evaluator."""
    recipe.data.check(MAKE_DATA)
    from medvl.eval import AnswerEval, get_protocol, read_answer_vocabulary, read_answered
    from medvl.models import create_vqa
    from medvl.train import Run, open_vqa, seeded

    answers = read_answer_vocabulary(recipe.data.train, recipe.protocol).answers
    normalize = get_protocol(recipe.protocol).normalize
    with seeded(recipe.train.seed):
        model = create_vqa(
            recipe.init_from,
            answers,
            fusion=recipe.fusion,
            image_size=recipe.data.image.size,
            head=recipe.head,
            decoder=recipe.decoder,
            head_lr_mult=recipe.head_lr_mult,
            earlier_image=recipe.earlier_image,
            question_prior=read_answered(recipe.data.train, normalize)
            if recipe.question_prior
            else (),
            frozen_encoders=recipe.frozen_encoders,
        )
    opened = open_vqa(recipe.data, model, answers, normalize, recipe.train.micro_batch)
    run = Run(recipe="vqa_finetune", settings=recipe, model=model, data=opened)
    return run.with_evaluator(lambda images: AnswerEval(images, recipe.protocol))


if __name__ == "__main__":
    launch(prepare, PRESETS, "Visual question answering.")
