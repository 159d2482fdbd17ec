"""Settings of the presets `tiny`: the data of `medvl phantom quickstart`, and minutes on two CPU
cores.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.models.base import ImageConfig, TowersConfig
from medvl.train.config import Cosine, OptimConfig, TrainConfig
from medvl.train.recipe import Recipe, ZeroShotRecipe
from medvl.train.tasks.pretraining import DataConfig

if TYPE_CHECKING:
    from medvl.data.transforms.text import TextPair
    from medvl.train.tasks.text import TextDataConfig
    from medvl.train.tasks.volumes import VolumeDataConfig

_Model = TypeVar("_Model", bound=ImageConfig)

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


def fusion_recipe(name: str, model: _Model, epochs: int = 12) -> "Recipe[_Model, DataConfig]":
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


LLAMA = (
    '{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}'
)
"""Settings of a small causal language model with random weights."""

REPORT_DATA = (
    "medvl phantom quickstart\n    medvl train convirt tiny\n"
    "    medvl phantom openi --out quickstart/openi --patients 1200 --size 160\n"
    "    medvl shards openi --root quickstart/openi --out quickstart/openi-views --short-side 160\n"
    "    medvl vocab --data quickstart/openi-views/train --out quickstart/openi-words --kind words "
    "--min-frequency 3 --sections findings impression\n"
    "    medvl train "
)
"""Commands that make the data of `report_recipe`; the name of the system and "tiny" follow."""


def report_recipe(
    name: str, model: _Model, text: "WholeText | TextPair"
) -> "Recipe[_Model, DataConfig]":
    """Return the preset `tiny` of a report generator, on the studies of a phantom of Open-i, that
    starts from the image encoder of the quickstart's ConVIRT.

    Args:
        name: folder of the run in quickstart/.
        model: settings of the system.
        text: what it writes.
    """
    return Recipe(
        model=model,
        pretrained=False,
        init_from=_CONVIRT,
        data=DataConfig(
            train="quickstart/openi-views/train",
            valid=Path("quickstart/openi-views/validate"),
            tokenizer=Path("quickstart/openi-words"),
            text=text,
            image=ConVIRTAugmentation.weak(112),
            workers=1,
            valid_batch=64,
        ),
        optim=dataclasses.replace(OPTIM, schedule=Cosine(warmup_steps=50)),
        train=TrainConfig(
            run_dir=Path("quickstart") / name,
            epochs=40,
            global_batch=32,
            precision="bf16",
            channels_last=True,
            validate_every=150,
            checkpoint_every=150,
            best_metric="report/f1_micro",
            best_mode="max",
        ),
    )


CHOICE_SHARDS = (
    "medvl phantom rexvqa --out quickstart/rexvqa --patients 3000 --size 160\n"
    "    medvl shards rexvqa --root quickstart/rexvqa --out quickstart/choices --short-side 160"
)
"""Commands that make the phantom's questions with four options."""

CHOICE_DATA = (
    f"{CHOICE_SHARDS}\n"
    "    medvl vocab --data quickstart/choices/train --out quickstart/choice-words --kind words\n"
    "    medvl train "
)
"""Commands that make the data of `choice_recipe`; the name of the system and the preset follow."""


def choice_recipe(name: str, reports: "Recipe[_Model, DataConfig]") -> "Recipe[_Model, DataConfig]":
    """Return a preset of a writer of answers, on the phantom's questions with four options, that
    starts from the image encoder of the demo.

    Args:
        name: folder of the run in quickstart/.
        reports: its preset of reports (`report_recipe`).
    """
    return dataclasses.replace(
        reports,
        init_from=Path("demo"),
        data=dataclasses.replace(
            reports.data,
            train="quickstart/choices/train",
            valid=Path("quickstart/choices/validate"),
            tokenizer=Path("quickstart/choice-words"),
            text=WholeText(sections=("answer",)),
            questions=True,
        ),
        train=dataclasses.replace(
            reports.train,
            run_dir=Path("quickstart") / name,
            epochs=10,
            global_batch=64,
            best_metric="loss",
            best_mode="min",
        ),
    )


def letter_recipes(
    reports: "Recipe[Any, DataConfig]",
) -> "tuple[Recipe[Any, DataConfig], Recipe[Any, DataConfig]]":
    """Return two presets of a writer of letters of options, on the data of `choice_recipe`: the
    first writes the options' texts, and the second starts from its result.

    The language model has larger initial weights, about 1 / sqrt(width). With the 0.02 of
    `transformers`, made for widths near 1,000, the loss of letters stays at ln 4, even on 32
    questions in 160 steps, or where the prompt names the right option; its attention may be too
    uniform to tell options apart. With 0.1, it knows 32 questions after 40 steps. At a rate of 1e-3
    the loss stays near ln 4 for 600 of 800 steps, at 3e-4 for 250.

    Args:
        reports: its preset of reports (`report_recipe`).
    """
    language = LLAMA.replace("}", ', "initializer_range": 0.1}')
    model = dataclasses.replace(reports.model, language=language)
    texts = choice_recipe("causal-lm-letters-start", dataclasses.replace(reports, model=model))
    train = dataclasses.replace(texts.train, epochs=None, steps=150)
    texts = dataclasses.replace(texts, train=train)
    letters = dataclasses.replace(
        texts,
        init_from=Path("quickstart/causal-lm-letters-start/best"),
        data=dataclasses.replace(texts.data, letters=True),
        optim=dataclasses.replace(texts.optim, lr=3e-4),
        train=dataclasses.replace(
            train, run_dir=Path("quickstart/causal-lm-letters"), steps=800, global_batch=32
        ),
    )
    return texts, letters


VOLUME_DATA = (
    "medvl phantom ct-rate --out ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1 && "
    "medvl shards ct-rate --root ct-rate --out ct-rate-shards && medvl vocab --data "
    "ct-rate-shards/train --out ct-rate-vocab --kind words && medvl train "
)
"""Commands that make the data of `volume_recipe`; the name of the recipe and "tiny" follow."""

VOLUMES: dict[str, Any] = {
    "volume_size": (16, 32, 32),
    "text_encoder": "tiny_bert",
    "text_arguments": {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "intermediate_size": 192,
        "hidden_dropout_prob": 0.0,
        "pool": "max",
    },
    "attention_dropout": 0.0,
    "projection_dim": 128,
    "max_tokens": 96,
    "positives": "text",
}
"""Model settings of dual-encoders of volumes: a BERT of two layers from scratch. A text is the
maximum over its tokens, as its class token starts equal for all texts.
"""


def volume_recipe(run_dir: str, model: _Model) -> "Recipe[_Model, VolumeDataConfig]":
    """Return the preset `tiny` of a dual-encoder of volumes, on chest CTs of the phantom: some
    sentences of a report in random order, both encoders from scratch.

    Args:
        run_dir: folder of the run.
        model: settings of the system.
    """
    from medvl.data.transforms.text import ShuffledSentences
    from medvl.data.volumes.transform import VolumeTransform
    from medvl.train.tasks.volumes import VolumeDataConfig

    return Recipe(
        model=model,
        pretrained=False,
        data=VolumeDataConfig(
            train="ct-rate-shards/train",
            valid=Path("ct-rate-shards/validate"),
            tokenizer=Path("ct-rate-vocab"),
            text=ShuffledSentences(sections=("findings",)),
            volume=VolumeTransform(size=VOLUMES["volume_size"]),
            reconstructions="one",
            workers=1,
        ),
        optim=dataclasses.replace(OPTIM, lr=2e-3, schedule=Cosine(warmup_steps=50)),
        train=TrainConfig(
            run_dir=Path(run_dir),
            steps=600,
            global_batch=64,
            validate_every=300,
            checkpoint_every=300,
        ),
    )
