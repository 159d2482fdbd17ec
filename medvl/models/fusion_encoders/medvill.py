"""MedViLL: one BERT over an image's cells and its report (Moon et al., arXiv 2105.11333, JBHI 2022)."""

import dataclasses
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from medvl.common.checks import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, freeze_layers
from medvl.errors import ConfigError
from medvl.losses.pairs.itm import MatchingPairs
from medvl.models.base import Parts
from medvl.models.fusion_encoders.bases.config import FusionConfig, check_attention
from medvl.models.fusion_encoders.bases.encoders import create_pixel_encoders
from medvl.models.fusion_encoders.bases.joint_bert import IMAGE, JointBERT
from medvl.models.fusion_encoders.objectives.base import Corruption, Encoded
from medvl.models.fusion_encoders.parts.attention_masks import CAUSAL_ATTENTIONS, Attention
from medvl.models.fusion_encoders.parts.corruption import sample_pairs
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.inputs import encode_present, sample_cells
from medvl.models.lineage import copy_training
from medvl.models.registry import register_system
from medvl.schema import Batch

# P cells of the grid, T text tokens including CLS and SEP; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedViLLConfig(FusionConfig):
    """Published settings of MedViLL.

    The released code trains nothing of the ResNet: its list of layers to train is empty, where the paper freezes the
    first ones.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 512
    fit: Literal["crop", "pad", "squash"] = "squash"
    """As the released fine-tuning code prepares images."""
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    frozen_image_layers: int = 1
    """Number of stages above the stem that are frozen together with it; 0 trains everything."""
    image_tokens: int = 180
    """Grid cells that are sampled in training; all are used if there are no more, and in eval mode."""
    attention: Attention = "bar"
    seq2seq_share: float = 0.75
    """With attention "mixed": share of samples that are trained with the sequence-to-sequence mask."""
    objective: Literal["pretraining", "report"] = "pretraining"
    """"pretraining": MLM and ITM. "report": fine-tuning for report generation by MLM alone, with matching images and
    with the closing token masked like words (with attention `seq2seq` in the paper)."""
    max_tokens: int = 255
    """Including the first and the last token: 253 word pieces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.objective, ("pretraining", "report"), "objective")
        unmatched: tuple[Attention, ...] = ("seq2seq",) if self.objective == "pretraining" else ()
        check_attention(self, unmatched=unmatched)
        check_within(self, "(0, inf)", "image_tokens")
        check_within(self, "[0, inf)", "frozen_image_layers")
        if self.objective == "report" and self.mirror_weight:
            message = "objective 'report' is without matching; leave mirror_weight 0"
            raise ConfigError(message, "conflict", field="mirror_weight")
        if self.objective == "report" and self.attention not in CAUSAL_ATTENTIONS:
            message = f"objective 'report' needs attention {' or '.join(CAUSAL_ATTENTIONS)}, got {self.attention!r}"
            raise ConfigError(message, "conflict", field="attention")


@register_system("medvill")
class MedViLL(JointBERT):
    """Joint BERT pretrained by masked words and image-text matching in one pass.

    Words are also predicted next to images that do not match. A wrong image is one of the batch whose text and labels
    differ (without labels, whose text differs); exactly half of the samples match, where the released code flips a
    coin. In eval mode all cells are used and a mixed mask is bidirectional, so that nothing is random.

    Positions of cells are rows of BERT's own table, so a checkpoint is fine-tuned at the image size that it has.
    """

    Config = MedViLLConfig
    numbers_cells = True

    def __init__(
        self, config: MedViLLConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        height, columns = image_encoder.grid(*image_encoder.image_size)
        if height * columns > text_encoder.max_tokens:
            message = f"{height * columns} cells exceed {text_encoder.max_tokens} positions; use a smaller image_size"
            raise ConfigError(message, "too_large", field="image_size")
        if config.objective == "report":
            self.objectives = (self.mlm,)
            self.masks_closing_token = True
            self.pooler.requires_grad_(False)
            self.itm_head.requires_grad_(False)
            self.can_match = False

    @classmethod
    def build(cls, config: MedViLLConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        image_encoder, text_encoder = create_pixel_encoders(config, "medvill", pretrained=pretrained)
        freeze_layers(image_encoder, config.frozen_image_layers)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    def for_reading(self) -> Self:
        """See the base class: attention becomes bidirectional and training reads all cells, as in the released code."""
        encoder: Any = self.image_encoder
        height, columns = encoder.grid(*encoder.image_size)
        if self.config.attention == "bidirectional" and self.config.image_tokens >= height * columns:
            return self
        config = dataclasses.replace(
            self.config,
            objective="pretraining",
            attention="bidirectional",
            image_tokens=max(self.config.image_tokens, height * columns),
            image_weights=None,
            text_weights=None,
        )
        other = self.build(config, pretrained=False, tokenizer=self.tokenizer)
        other.load_state_dict(self.state_dict(), strict=True)
        copy_training(self, other)
        return other.train(self.training)

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Embed the cells; training samples `config.image_tokens` of them, the same for all images of a batch."""
        tokens = encode_present(has_image_B, self.pooled_dim, self._embed_cells, image)
        if has_image_B is None:
            return tokens
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])  # CLS and SEP remain as keys

    def _embed_cells(self, image: Tensor) -> Tokens:
        cells_BPD = self.image_encoder(image).patches_BPD
        place_P = torch.arange(cells_BPD.shape[1], device=cells_BPD.device)
        if self.training and self.config.image_tokens < len(place_P):
            place_P = sample_cells(len(place_P), self.config.image_tokens, 1)[0].to(cells_BPD.device)
        place_BP = place_P.expand(len(cells_BPD), -1)
        states_BPD = self.text_encoder.embed_vectors(
            self.image_input(cells_BPD[:, place_P]),
            position_ids=place_BP,
            token_type_ids=torch.full_like(place_BP, IMAGE),
        )
        return Tokens(states_BPD, None)

    def sample_pairs(self, batch: Batch) -> MatchingPairs:
        """Sample pairs; samples with equal labels are not each other's negatives, samples without labels may be."""
        if not batch.labels_BL.shape[1]:
            return sample_pairs(batch)
        missing = -2.0  # not a label value; NaN does not equal NaN
        group_B = batch.labels_BL.nan_to_num(missing).unique(dim=0, return_inverse=True)[1]
        own_B = -1 - torch.arange(len(group_B), device=group_B.device)
        return sample_pairs(batch, torch.where(batch.labels_BL.isnan().all(dim=1), own_B, group_B))

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse every masked text with the image sampled for it in one pass."""
        return self.encode_together(batch, corruption)
