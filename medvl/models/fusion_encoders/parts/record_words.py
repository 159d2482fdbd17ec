"""Masked words of a report as MRM and ECAMP select them: always by the mask token, entities first, negations light."""

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.checks import check_choice, check_within
from medvl.data.knowledge.finder import EntityFinder
from medvl.data.knowledge.linker import EntityLinker
from medvl.losses.masked.mlm import IGNORED, masked_positions
from medvl.models.base import System, complete_rows
from medvl.models.masked_words import text_masking
from medvl.schema import Batch

ENTITIES = (
    *("effusion", "effusions", "pneumothorax", "edema", "atelectasis", "consolidation", "pneumonia", "cardiomegaly"),
    *("fracture", "fractures", "nodule", "nodules", "mass", "opacity", "opacities", "infiltrate", "emphysema"),
    *("hernia", "thickening", "scarring", "calcification", "granuloma", "congestion", "collapse", "fibrosis"),
    *("catheter", "tube", "pacemaker", "line", "lung", "lungs", "heart", "mediastinum", "pleura", "hilar", "cardiac"),
)
"""Words that name a finding, a device or an organ; ECAMP has 44 of its own."""
_TEMPLATES = "there is no evidence of", "there is no"
_NEAR = 2
"""Tokens on each side of an entity that are masked with it, and before an entity that are its context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordWordsConfig:
    """Settings of masked words, to inherit beside a system's other settings; MRM's by default, options are ECAMP's."""

    mlm_probability: float = 0.5
    """Share of the words that are replaced by the mask token."""
    mlm_weight: float = 1.0
    entities_first: bool = False
    """Mask words of entities and beside them before other words."""
    entities: tuple[str, ...] = ENTITIES
    negation_weight: float = 1.0
    """Weight of the words "there is no (evidence of)". The difference is added to the weights of up to two words before
    each entity (`entities_first`), or of all words of a text without entities."""
    text_fusion: Literal["add", "attention"] = "add"
    """Image input of words: "add" adds the mean patch to each word; "attention" also adds its attention over the
    patches."""

    def check_words(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_within(self, "(0, 1)", "mlm_probability")
        check_within(self, "[0, inf)", "mlm_weight")
        check_within(self, "(0, 1]", "negation_weight")
        check_choice(self.text_fusion, ("add", "attention"), "text_fusion")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordMask:
    """Texts with masked words. N masked positions."""

    ids_BT: Tensor
    position_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch."""
    target_N: Tensor
    weight_N: Tensor
    """float32: weight of each masked position in the loss."""


class RecordWords:
    """Masking of the words of a batch.

    Args:
        model: has the tokenizer.
        config: selection of words, and their weights.

    Raises ConfigError without a tokenizer or a mask token.
    """

    def __init__(self, model: System, config: RecordWordsConfig) -> None:
        self.masking = text_masking(model, rate=config.mlm_probability, whole_words=True)
        assert model.tokenizer is not None, "checked by text_masking"
        self.rate, self.negation_weight = config.mlm_probability, config.negation_weight
        self.entities = None
        if config.entities_first:
            finder = EntityFinder.of((name, number) for number, name in enumerate(config.entities))
            self.entities = EntityLinker(finder, model.tokenizer, most=64)
        finder = EntityFinder.of((name, number) for number, name in enumerate(_TEMPLATES))
        self.templates = EntityLinker(finder, model.tokenizer, most=64)
        self._stop = model.tokenizer.vocabulary.get(".", -1)

    def __call__(self, batch: Batch) -> RecordMask:
        """Mask words of the samples that have an image and a text."""
        ids_BT, usable_BT = batch.ids_BT, torch.zeros_like(batch.mask_BT)
        row_K = complete_rows(batch)
        usable_BT[row_K] = batch.mask_BT[row_K]
        uniform_3BT = torch.rand(3, *ids_BT.shape).to(ids_BT.device)
        order_BT = self.masking.draw(ids_BT, usable_BT, uniform_3BT).order_BT
        mention_BT = None
        if self.entities is not None:
            mention_BT = self.entities(ids_BT, usable_BT).mention_BT.to(ids_BT.device)
            order_BT = _near_first(order_BT, mention_BT)
        masked_BT = order_BT < self.rate
        position_N = masked_positions(ids_BT.masked_fill(~masked_BT, IGNORED))
        weight_BT = torch.ones(ids_BT.shape, device=ids_BT.device)
        if self.negation_weight != 1:
            weight_BT = self.word_weights(ids_BT, usable_BT, mention_BT)
        return RecordMask(
            ids_BT=ids_BT.masked_fill(masked_BT, self.masking.mask_id),
            position_N=position_N,
            target_N=ids_BT.flatten()[position_N],
            weight_N=weight_BT.flatten()[position_N],
        )

    def word_weights(self, ids_BT: Tensor, mask_BT: Tensor, mention_BT: Tensor | None) -> Tensor:
        """Return (B, T) float32: weights of the words, whose sum over a text is its number of tokens."""
        template_BT = self.templates(ids_BT, mask_BT).mention_BT.to(ids_BT.device) >= 0
        light_BT = torch.where(template_BT, self.negation_weight, 1.0)
        gains_BT = torch.zeros_like(template_BT)
        if mention_BT is not None:
            first_BT = (mention_BT >= 0) & (mention_BT != F.pad(mention_BT, (1, 0), value=-1)[:, :-1])
            for distance in range(1, _NEAR + 1):
                gains_BT |= F.pad(first_BT, (0, distance))[:, distance:]
            gains_BT &= mask_BT.bool() & (ids_BT != self._stop)
        gains_BT = torch.where(gains_BT.any(dim=1, keepdim=True), gains_BT, mask_BT.bool())
        lost_B1 = ((1 - light_BT) * mask_BT).sum(dim=1, keepdim=True)
        rate_B1 = 1 + lost_B1 / (light_BT * gains_BT).sum(dim=1, keepdim=True).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        return torch.where(gains_BT, light_BT * rate_B1, light_BT)


def _near_first(order_BT: Tensor, mention_BT: Tensor) -> Tensor:
    """Return the share of a text's tokens that are selected before each one: units near a mention come first.

    The tokens of a unit have one number before and after; never selected ones keep infinity.
    """
    near_BT = (mention_BT >= 0).float()[:, None]
    near_BT = F.max_pool1d(near_BT, 2 * _NEAR + 1, stride=1, padding=_NEAR)[:, 0] > 0
    selectable_BT = order_BT.isfinite()
    same_BTT = (order_BT[:, :, None] == order_BT[:, None, :]) & selectable_BT[:, :, None]
    near_BT = (same_BTT & near_BT[:, None, :]).any(dim=2)  # a unit is near where one of its tokens is
    order_BT = torch.where(near_BT, order_BT, order_BT + 1)
    before_BT = ((order_BT[:, None, :] < order_BT[:, :, None]) & selectable_BT[:, None, :]).sum(dim=2)
    share_BT = before_BT / selectable_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return share_BT.masked_fill(~selectable_BT, torch.inf)
