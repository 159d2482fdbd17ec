"""Settings of the presets `tiny`: the data of `medvl phantom quickstart`, and minutes on two CPU
cores.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.models.base import ImageConfig, TowersConfig
from medvl.train.config import Cosine, OptimConfig, TrainConfig
from medvl.train.recipe import Recipe, ZeroShotRecipe
from medvl.train.tasks.pretraining import DataConfig

if TYPE_CHECKING:
    from medvl.train.tasks.text import TextDataConfig

DATA = DataConfig(
    train="quickstart/shards/train",
    valid=Path("quickstart/shards/validate"),
    tokenizer=Path("quickstart/vocab"),
    text=WholeText(sections=("impression",)),
    image=ConVIRTAugmentation.weak(112),
    workers=1,
)
"""Shards of `medvl phantom quickstart`. With encoders from scratch and about 5,000 pairs, complete
impressions carry more information per step than single sentences, and a strong augmentation slows
down learning.
"""

OPTIM = OptimConfig(
    optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_norm=1.0, schedule=Cosine(warmup_steps=100)
)
"""Optimiser and schedule for small encoders from scratch."""

SCALED = 75
"""Steps of an epoch, a few fewer than those of the quickstart, below which the warm-up and the
intervals of these presets are shortened: on other data, of a few hundred images.
"""

TRAIN = TrainConfig(
    run_dir=Path("quickstart/run"),
    epochs=14,
    scale_below=1000,
    global_batch=64,
    precision="bf16",
    channels_last=True,
    validate_every=250,
    checkpoint_every=250,
    best_metric="zero_shot/auroc_macro_competition",
    best_mode="max",
)
"""About a thousand steps, minutes on two CPU cores; `best` has the highest zero-shot AUROC."""

TEXT_TRAIN = TrainConfig(
    run_dir=Path("quickstart/run"),
    epochs=10,
    global_batch=64,
    precision="bf16",
    packed_text=True,
    best_metric="masked/accuracy",
    best_mode="max",
)
"""Training of systems that read text only; `best` is the checkpoint that predicts the most
masked words.
"""

_NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
ENCODERS: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {},
    "text_encoder": "tiny_bert",
    "text_arguments": _NO_DROPOUT,
    "image_size": 112,
    "fit": "squash",
    "max_tokens": 48,
}
"""Model settings of fusion-encoders: the ResNet-10 and the three-layer BERT of the quickstart's
ConVIRT.
"""

FUSION: dict[str, Any] = {"layers": 2, "heads": 3, "intermediate": 768, "dropout": 0}
"""Model settings of a small fusion-encoder over `ENCODERS`."""

FASTER_FUSION: dict[str, Any] = {**FUSION, "fusion_lr_mult": 2.0, "head_lr_mult": 2.0}
"""The same, where fusion-encoder and heads learn faster than the encoders, as in METER and its
successors.
"""

ALIGNED: dict[str, Any] = {
    **ENCODERS,
    **FASTER_FUSION,
    "text_arguments": {"num_hidden_layers": 3, **_NO_DROPOUT},
    "projection_dim": 128,
    "queue_size": 1024,
    "momentum": 0.98,
    "ramp_steps": 120,
}
"""Model settings of ALBEF and its successors: a short queue, and a teacher that follows faster."""

QUERIES: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {},
    "text_encoder": "tiny_bert",
    "image_size": 112,
    "fit": "squash",
    "projection_dim": 128,
    "max_tokens": 48,
    "decoder_layers": 2,
    "decoder_hidden": 256,
    "dropout": 0.0,
    "init_std": None,
}
"""Model settings of MedKLIP and its successors: two layers of queries over the grid of
`ENCODERS`' image encoder.
"""

_CONVIRT = Path("quickstart/convirt/best")


def text_data() -> "TextDataConfig":
    """Return the reports of the same shards, for systems that read text only."""
    from medvl.train.tasks.text import TextDataConfig

    return TextDataConfig(
        train=Path("quickstart/shards/train"),
        valid=Path("quickstart/shards/validate"),
        tokenizer=Path("quickstart/vocab"),
        sections=("findings", "impression"),
        workers=1,
    )


def zero_shot_recipe(
    name: str,
    model: TowersConfig,
    data: DataConfig = DATA,
    prompts: str = "chexpert_ensemble",
    *,
    packed_text: bool = True,
) -> ZeroShotRecipe:
    """Return the preset `tiny` of a dual-encoder from scratch.

    Args:
        name: folder of the run in quickstart/.
        model: settings of the system.
        data: shards, texts and augmentation.
        prompts: prompt set of the evaluation during training.
        packed_text: `TrainConfig.packed_text`; False for text encoders that are no BERT.
    """
    return ZeroShotRecipe(
        model=model,
        pretrained=False,
        data=data,
        optim=OPTIM,
        train=dataclasses.replace(
            TRAIN, run_dir=Path("quickstart") / name, packed_text=packed_text
        ),
        prompts=prompts,
    )


def zero_shot_from_convirt(
    name: str, model: TowersConfig, data: DataConfig = DATA, prompts: str = "chexpert_ensemble"
) -> ZeroShotRecipe:
    """Return the preset `tiny` of a dual-encoder that starts from the encoders of the quickstart's
    ConVIRT.

    Arguments are those of `zero_shot_recipe`.
    """
    scratch = zero_shot_recipe(name, model, data, prompts)
    return dataclasses.replace(
        scratch,
        init_from=_CONVIRT,
        optim=dataclasses.replace(OPTIM, lr=6e-4),
        train=dataclasses.replace(scratch.train, epochs=12, scale_below=12 * SCALED),
    )


def fusion_recipe(name: str, model: ImageConfig, epochs: int = 12) -> Recipe:
    """Return the preset `tiny` of a fusion-encoder that starts from the encoders of the
    quickstart's ConVIRT.

    Args:
        name: folder of the run in quickstart/.
        model: settings of the system.
        epochs: length of the run.
    """
    train = dataclasses.replace(
        TRAIN, run_dir=Path("quickstart") / name, epochs=epochs, packed_text=True
    )
    train = dataclasses.replace(train, scale_below=epochs * SCALED)
    return Recipe(
        model=model,
        pretrained=False,
        init_from=_CONVIRT,
        data=DATA,
        optim=dataclasses.replace(OPTIM, lr=5e-4),
        train=dataclasses.replace(train, best_metric="loss", best_mode="min"),
    )
