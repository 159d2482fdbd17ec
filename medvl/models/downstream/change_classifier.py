"""Classification of change between an image and its prior image, on the image side of any
dual-encoder.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_labels, check_within, from_dict
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import freeze_batch_norm_statistics, parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import System, SystemConfig, evaluating, update_mean
from medvl.models.checkpoint import load
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.biovil_t import SupportsPriors
from medvl.models.registry import register_system, system
from medvl.schema import CHANGES, Batch, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeClassifierConfig(SystemConfig):
    """Settings of a linear layer for change on a dual-encoder."""

    dual_encoder: str
    """Name of the dual-encoder's system: biovil_t, convirt, ..."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its configuration that differ from the published ones."""
    findings: tuple[str, ...]
    use_prior: bool = True
    """Read the prior image; False measures what it adds."""
    head_lr_mult: float = 10.0
    """Learning rate of the linear layer, as a multiple of the encoder's."""

    def __post_init__(self) -> None:
        check_labels(self.findings, "findings")
        check_within(self, "(0, inf)", "head_lr_mult")


@register_system("change_classifier")
class ChangeClassifier(System):
    """Logits of improving, stable and worsening for each finding, from the vector of an image and
    its prior image.

    The vector is that of `embed_with_prior` where the dual-encoder has it; else the two images' own
    vectors side by side, with zeros for a missing prior image. Everything that images pass through
    is trained, also what the dual-encoder's pretraining froze; text parts are frozen. Rows without
    any label, such as a corpus's prior images themselves, and placeholders of missing prior images
    do not enter batch norms.
    """

    Config = ChangeClassifierConfig

    def __init__(self, config: ChangeClassifierConfig, dual_encoder: DualEncoder) -> None:
        super().__init__(config, transform=dual_encoder.transform, tokenizer=None)
        self.dual_encoder = dual_encoder
        self.inputs = Inputs(prior_image=config.use_prior)
        dual_encoder.image_encoder.unfreeze()
        for name, child in dual_encoder.named_children():
            if name.startswith(("text", "word")):
                child.requires_grad_(False)
        size = self.transform.size
        channels = dual_encoder.image_encoder.in_channels
        blank_1CHW = torch.zeros(
            1, channels, size, size, dtype=torch.uint8, device=dual_encoder.device
        )
        with evaluating(dual_encoder):
            width = self._vectors(blank_1CHW, blank_1CHW, torch.ones(1, dtype=torch.bool)).shape[1]
        self.change_head = nn.Linear(width, len(config.findings) * len(CHANGES))
        nn.init.zeros_(self.change_head.weight)  # the loss starts at ln 3, without random weights
        nn.init.zeros_(self.change_head.bias)

    @classmethod
    def build(
        cls, config: ChangeClassifierConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        if tokenizer is not None:
            message = "change_classifier does not read text; leave tokenizer out"
            raise ConfigError(message, "unsupported", field="tokenizer")
        dual = system(
            config.dual_encoder
        )  # not `create_model`: a checkpoint must not name further files to read
        settings = from_dict(dual.Config, config.settings)
        return cls(
            config,
            _checked(dual.build(settings, pretrained=pretrained, tokenizer=None), "dual_encoder"),
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the cross-entropy, averaged over labels; `batch.labels_BL` has the columns of
        `config.findings`.

        Labels are -1 (improving), 0 (stable), 1 (worsening) or NaN (ignored).
        """
        batch, statistics = self._labelled_rows(batch)
        known_BL = ~batch.labels_BL.isnan()
        target_BL = (batch.labels_BL.nan_to_num() + 1).long().masked_fill(~known_BL, -100)
        with statistics:
            logits_BLC = self.change_logits(batch).float()
        total = F.cross_entropy(logits_BLC.flatten(0, 1), target_BL.flatten(), reduction="sum")
        return Losses.sum(change=update_mean(batch, total, known_BL.sum()))

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many labels the loss of a batch is a sum over."""
        return (~batch.labels_BL.isnan()).sum().float()[None]

    def change_logits(self, batch: Batch) -> Tensor:
        """Return (B, L, 3) of a batch: improving, stable and worsening for each of
        `config.findings`.

        Raises ConfigError for a batch without prior images, unless `config.use_prior` is False.
        """
        prior_BCHW = batch.prior_BCHW
        has_prior_B = batch.has_prior_B
        if self.config.use_prior and (prior_BCHW is None or has_prior_B is None):
            message = "expected Batch.prior_BCHW: open the loader with the model's inputs"
            raise ConfigError(message, "missing", field="prior_BCHW")
        logits_BK: Tensor = self.change_head(
            self._vectors(batch.image_BCHW, prior_BCHW, has_prior_B)
        )
        return logits_BK.unflatten(1, (-1, len(CHANGES)))

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimiser groups: the encoder at `lr`, and the linear layer at `head_lr_mult`
        times `lr`.
        """
        parts = (
            ("encoder", self.dual_encoder, lr),
            ("head", self.change_head, lr * self.config.head_lr_mult),
        )
        return [
            {**group, "name": f"{name}: {group['name']}"}
            for name, module, rate in parts
            for group in parameter_groups(module, rate, weight_decay)
        ]

    def _labelled_rows(self, batch: Batch) -> tuple[Batch, contextlib.AbstractContextManager[None]]:
        """Return the rows that have a label, and a context for their encoding.

        A batch with fewer than two such rows is returned as it is, because every rank must use all
        weights and batch norms need two rows; in the context it does not update their running
        statistics.
        """
        row_K = (~batch.labels_BL.isnan()).any(dim=1).nonzero().squeeze(1)
        if len(row_K) == len(batch):
            return batch, contextlib.nullcontext()
        if len(row_K) < 2:
            return batch, freeze_batch_norm_statistics(self)
        return batch.rows(row_K.tolist()), contextlib.nullcontext()

    def _vectors(
        self, image_BCHW: Tensor, prior_BCHW: Tensor | None, has_prior_B: Tensor | None
    ) -> Tensor:
        """Return (B, D) float32."""
        model = self.dual_encoder
        if not self.config.use_prior or prior_BCHW is None or has_prior_B is None:
            return model.encode_image(image_BCHW)
        has_prior_B = has_prior_B.to(image_BCHW.device)
        if isinstance(model, SupportsPriors):
            return model.embed_with_prior(image_BCHW, prior_BCHW, has_prior_B).global_NE
        count = len(image_BCHW)
        row_K = has_prior_B.nonzero().squeeze(1)
        both_NE = model.encode_image(
            torch.cat([image_BCHW, prior_BCHW[row_K]])
        )  # one pass, and one batch norm
        vector_BE, prior_KE = both_NE.tensor_split([count])
        return torch.cat(
            [vector_BE, torch.zeros_like(vector_BE).index_copy(0, row_K, prior_KE)], dim=1
        )


def create_change_classifier(
    start: Path | str,
    findings: tuple[str, ...],
    *,
    use_prior: bool = True,
    head_lr_mult: float = 10.0,
) -> ChangeClassifier:
    """Put a new linear layer on a dual-encoder's checkpoint.

    Args:
        start: checkpoint of a dual-encoder.
        findings: names of the columns.
        use_prior, head_lr_mult: see `ChangeClassifierConfig`.

    Raises CheckpointError where `start` is not a complete checkpoint, ConfigError where it is not a
    dual-encoder.
    """
    model = _checked(load(start), "init_from")
    settings = dataclasses.asdict(model.config) | {"image_weights": None, "text_weights": None}
    config = ChangeClassifierConfig(
        dual_encoder=model.name,
        settings=settings,
        findings=findings,
        use_prior=use_prior,
        head_lr_mult=head_lr_mult,
    )
    return ChangeClassifier(config, model)


def _checked(model: System, field: str) -> DualEncoder:
    if not isinstance(model, DualEncoder):
        message = f"expected a dual-encoder such as biovil_t or convirt, got {model.name}"
        raise ConfigError(message, "wrong_type", field=field)
    return model
