"""Base of task heads on any fusion-encoder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from medvl.common.checks import check_within
from medvl.common.config_io import from_dict
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import System, SystemConfig
from medvl.models.checkpoint import load, load_towers
from medvl.models.downstream.classifier import image_encoder_of
from medvl.models.downstream.image_size import at_image_size
from medvl.models.factory import create_model
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.bases.config import FusionConfig
from medvl.models.fusion_encoders.parts.encoder import Pooler
from medvl.models.fusion_encoders.parts.prompts import PromptPool
from medvl.models.registry import system
from medvl.schema import Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionTaskConfig(SystemConfig):
    """Base of the settings of a task head on a fusion-encoder."""

    fusion: str
    """Name of the fusion-encoder's system: m3ae, medvill, dual_stream, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its configuration that differ from the published ones."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'; None is the published one of the head."""
    max_tokens: int
    """Maximum length of a text."""
    vocab_size: int | None = None
    """Vocabulary size of the text encoder; None: as in `settings`, or the tokenizer's if one is given."""

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "head_lr_mult")

    @property
    def effective_head_lr_mult(self) -> float:
        """`head_lr_mult`, or the published value of the head if it is None."""
        return 1.0 if self.head_lr_mult is None else self.head_lr_mult


class FusionTask(System):
    """A fusion-encoder and a head, whose attribute name is `head_name`.

    Pretraining heads are kept and frozen, so that a checkpoint of this model can initialise another pretraining; so are
    prompts, as published, and layers that the head does not read.
    """

    head_name: ClassVar[str]

    def __init__(self, config: FusionTaskConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, transform=fusion_model.transform, tokenizer=fusion_model.tokenizer)
        self.fusion_model = fusion_model
        self.inputs = Inputs(regions=fusion_model.inputs.regions)
        for name, child in fusion_model.named_children():
            if name.endswith("head"):
                child.requires_grad_(False)
        for module in fusion_model.modules():
            if isinstance(module, PromptPool):
                module.requires_grad_(False)
        self.freeze_unread(reads_pooled=True)

    @classmethod
    def build(cls, config: FusionTaskConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        settings = dict(config.settings)
        if config.vocab_size is not None:
            settings["vocab_size"] = config.vocab_size
        settings |= {"image_weights": None, "text_weights": None}  # a checkpoint must not name further files to read
        fusion = from_dict(system(config.fusion).Config, settings)
        model = create_model(fusion, pretrained=pretrained, tokenizer=tokenizer)
        if not isinstance(model, FusionModel):
            message = f"fusion must name a fusion-encoder such as dual_stream or m3ae, got {config.fusion!r}"
            raise ConfigError(message, "wrong_type", field="fusion")
        return cls(config, model)

    def freeze_unread(self, *, reads_pooled: bool) -> None:
        """Freeze the layers that the head does not read, and train those that it reads.

        Args:
            reads_pooled: the head reads `Fused.pooled_BD` alone; False: the states, and no pooler.
        """
        for module in self.fusion_model.modules():
            if isinstance(module, Pooler):  # frozen in a MedViLL that was trained for reports
                module.requires_grad_(reads_pooled)
        for module in self.fusion_model.unread_by_pooled():
            module.requires_grad_(not reads_pooled)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the fusion model's groups, and the head at `head_lr_mult` times `lr`."""
        groups = self.fusion_model.parameter_groups(lr, weight_decay)
        head = parameter_groups(
            self.get_submodule(self.head_name), lr * self.config.effective_head_lr_mult, weight_decay
        )
        return [*groups, *({**group, "name": f"{self.head_name}: {group['name']}"} for group in head)]


def described_fusion(fusion_model: FusionModel) -> dict[str, Any]:
    """Return the fields of a `FusionTaskConfig` that describe a fusion-encoder."""
    settings = dataclasses.asdict(fusion_model.config) | {"image_weights": None, "text_weights": None}
    return {
        "fusion": fusion_model.name,
        "settings": settings,
        "max_tokens": settings["max_tokens"],
        "vocab_size": settings["vocab_size"],
    }


def open_fusion(
    start: Path | str,
    fusion: FusionConfig | None = None,
    image_size: int | None = None,
    max_tokens: int | None = None,
) -> FusionModel:
    """Load the fusion-encoder of a checkpoint for a new head.

    Args:
        start: checkpoint of a fusion-encoder or of a head on one; or of a dual-encoder, whose towers are used under a
            new fusion-encoder.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None: as in `start`.
        max_tokens: maximum length of a text; None: as in `start`.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: `start` is a dual-encoder and `fusion` is None, or the image size or the length of texts does not
            fit the model.
    """
    model = load(start)
    if isinstance(model, FusionTask):
        model = model.fusion_model
    if not isinstance(model, FusionModel):
        if fusion is None:
            message = f"{start} is a {model.name} without a fusion-encoder; give the sizes of one"
            raise ConfigError(message, "missing", field="fusion")
        model = _on_towers(model, fusion, start)
    model = model if image_size is None else at_image_size(model, image_size)
    return model if max_tokens is None else _at_max_tokens(model, max_tokens)


def _at_max_tokens(model: FusionModel, max_tokens: int) -> FusionModel:
    """Make the model read texts of that length, also longer ones than its pretraining did. It is not copied."""
    longest = model.text_encoder.max_tokens
    if max_tokens > longest:
        message = f"max_tokens must be at most {longest} (positions of {model.config.text_encoder}), got {max_tokens}"
        raise ConfigError(message, "too_large", field="max_tokens")
    model.config = dataclasses.replace(model.config, max_tokens=max_tokens)
    if model.tokenizer is not None:
        model.tokenizer = model.tokenizer.with_max_tokens(max_tokens)
    return model


def _on_towers(model: System, fusion: FusionConfig, start: Path | str) -> FusionModel:
    """Put a new fusion-encoder on the towers of a dual-encoder's checkpoint, with pixels as in its pretraining."""
    own: Any = model.config
    names = ("image_encoder", "text_encoder", "image_size", "fit", "max_tokens", "vocab_size")
    encoder = image_encoder_of(model).config
    pixels = {name: encoder[name] for name in ("mean", "std") if encoder[name] is not None}
    if encoder.get("stretch"):
        pixels |= {name: encoder[name] for name in ("image_size", "stretch")}
    language: Any = model.get_submodule("text_encoder")
    projection = {"projection": True} if language.config["projection"] else {}
    config = dataclasses.replace(
        fusion,
        **{name: getattr(own, name) for name in names},
        image_arguments={**own.image_arguments, **pixels},
        text_arguments={**fusion.text_arguments, **own.text_arguments, **projection},
    )
    fusion_model = create_model(config, tokenizer=model.tokenizer)
    assert isinstance(fusion_model, FusionModel)
    load_towers(fusion_model, start)
    return fusion_model
