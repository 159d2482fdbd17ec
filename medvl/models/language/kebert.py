"""Knowledge encoder of KAD's first stage, Med-KEBERT (Zhang et al., Nature Communications 2023,
arXiv 2302.14042).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import ConceptPairs
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.encoders.text.adapters import knowledge_head
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.losses.pairs.blockwise import name_ids
from medvl.models.base import System
from medvl.models.language.base import TextModelConfig
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class KEBERTConfig(TextModelConfig):
    """Settings of the paper and the released code; the published start is UMLSBert or
    Bio_ClinicalBERT.
    """

    text_encoder: str = "pubmedbert"
    max_tokens: int = 128
    projection_dim: int = 768
    temperature: float = 0.07
    """Initial temperature; the logarithm of its inverse is learned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature")
        check_within(self, "[1, inf)", "projection_dim")


@register_system("kebert")
class KEBERT(System):
    """InfoNCE of facts and names of concepts (section "knowledge encoder"): definitions, and
    relations without an end.

    Facts of one concept are positives of all its names in the batch. In the released code their
    targets are divided by the length of the vector and not by its sum, so that they sum to more
    than 1; it also masks 0.15 of the tokens of half of the texts and keeps the inverse temperature
    below 100, which this class does not. KAD takes the encoder and the head with `init_from`, other
    systems the encoder.
    """

    Config = KEBERTConfig
    shared_encoders = ("text_encoder", "text_head")

    def __init__(
        self, config: Any, text_encoder: TextEncoder, text_head: nn.Module, **parts: Any
    ) -> None:
        super().__init__(config, **parts)
        self.text_encoder = text_encoder
        self.text_head = text_head
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        arguments = {**config.text_arguments, "vocab_size": config.vocab_size}
        encoder = create_text_encoder(
            config.text_encoder, pretrained=pretrained, pool="cls", **arguments
        )
        head = knowledge_head(encoder.feature_dim, config.projection_dim)
        return cls(config, encoder, head, transform=EvalTransform(size=32), tokenizer=tokenizer)

    @functools.cached_property
    def sequences(self) -> ConceptPairs:
        """Maker of the training pairs, for `open_text_loader`. Raises ConfigError without a
        tokenizer.
        """
        return ConceptPairs(self.require_tokenizer("training"), self.config.max_tokens)

    def encode_text(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return (B, E) float32, L2-normalised."""
        vector_BE: Tensor = self.text_head(self.text_encoder(ids_BT, mask_BT).pooled_BD)
        return F.normalize(vector_BE.float(), dim=-1)

    def embed_pairs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors of facts and of names, (B, E), and the number of each row's concept,
        (B,) int64.

        Raises ConfigError for a batch that `open_text_loader` did not make.
        """
        if batch.second_ids_BT is None or batch.second_mask_BT is None or batch.studies is None:
            message = (
                "expected a batch of open_text_loader(source, model.sequences, ...) with "
                "names of concepts"
            )
            raise ConfigError(message, "wrong_type", field="batch")
        fact_BE = self.encode_text(batch.ids_BT, batch.mask_BT)
        name_BE = self.encode_text(batch.second_ids_BT, batch.second_mask_BT)
        return fact_BE, name_BE, name_ids(batch.studies).to(fact_BE.device)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss "contrast" of the global batch."""
        fact_NE, name_NE, concept_N = map(gather, self.embed_pairs(batch))
        return Losses.sum(
            contrast=losses.clip(fact_NE, name_NE, self.logit_scale.exp(), groups=(concept_N,))
        )


class ConceptScore:
    """Evaluator of `KEBERT` for training runs: the name of a held-out concept found from a fact
    about it.

    Args:
        batches: validation batches, of an `open_text_loader` with `train=False`.

    Calling it with a model returns concepts/recall@1, concepts/mrr, and their values by chance. The
    candidates are one name of each concept. The rank of the right one is 1, plus the number of
    higher scores, plus half the number of equal ones (concepts with the same name); a right name
    without a score (NaN) is last.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        parts = [
            [x.cpu() for x in model.embed_pairs(batch.to(model.device))] for batch in self.batches
        ]
        fact_NE, name_NE, concept_N = (torch.cat(each) for each in zip(*parts, strict=True))
        known_C, column_N = concept_N.unique(return_inverse=True)
        first_C = torch.full((len(known_C),), len(column_N)).scatter_reduce(
            0, column_N, torch.arange(len(column_N)), "amin"
        )
        rank_N = _ranks(fact_NE @ name_NE[first_C].T, column_N)
        chance = (1 / torch.arange(1, len(known_C) + 1)).mean()
        return {
            "concepts/recall@1": float((rank_N == 1).float().mean()),
            "concepts/mrr": float((1 / rank_N).mean()),
            "concepts/chance_recall@1": 1 / len(known_C),
            "concepts/chance_mrr": float(chance),
        }


def _ranks(score_NC: Tensor, column_N: Tensor) -> Tensor:
    """Return the rank of the score in each row's column, (N,) float32: ties count half, and NaN
    is last.
    """
    own_N1 = score_NC.gather(1, column_N[:, None])
    higher_N = (score_NC > own_N1).sum(dim=1)
    equal_N = (score_NC == own_N1).sum(dim=1)
    last_N = torch.full((len(score_NC),), float(score_NC.shape[1]))
    return torch.where(own_N1[:, 0].isnan(), last_N, 1 + higher_N + (equal_N - 1) / 2)
