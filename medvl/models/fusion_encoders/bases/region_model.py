"""The base of systems that read regions with boxes and predict masked ones (UNITER, LXMERT).

P regions, F features with their box code; the other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.models.bert_init import INIT_STD, LAYER_NORM_EPS, init_weights
from medvl.models.fusion_encoders.bases.config import FusionConfig
from medvl.models.fusion_encoders.bases.masked_matching import MaskedMatchingModel
from medvl.models.fusion_encoders.objectives.base import Corruption, Encoded, MaskedRegions
from medvl.models.fusion_encoders.objectives.regions import RegionObjective
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.fusion_encoders.parts.regions import RegionInput, RegionMask
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionConfig(FusionConfig):
    """Settings of systems with masked regions.

    The papers' regions are of a frozen detector: `image_encoder="regions:WIDTH+CODE"`. By default they are the cells of
    an image encoder's grid, which is trained by the other objectives; true features have no gradient.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 224
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    region_probability: float = 0.15
    """Share of regions that are masked, at least one of each image."""
    region_classes: int = 0
    """Classes of the detector, whose distribution is predicted; 0: not predicted, as for cells of a grid."""
    region_feature_weight: float = 1.0
    """Weight of the features of masked regions (UNITER's MRFR)."""
    region_class_weight: float = 1.0
    """Weight of the detector's classes of masked regions (UNITER's MRC, LXMERT's labels)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1)", "region_probability")
        check_within(self, "(0, inf)", "region_feature_weight", "region_class_weight")
        check_within(self, "[0, inf)", "region_classes")


class RegionModel(MaskedMatchingModel):
    """A system whose `image_input` is a `RegionInput`; `embed_regions` makes image tokens of its regions."""

    image_input: RegionInput
    image_encoder: ImageSource
    zeros: ClassVar[float] = 1.0
    replaced: ClassVar[float] = 0.0
    """Shares of the masked regions that are read as zeros, and as other regions (`sample_region_mask`)."""

    def require_classes(self) -> None:
        """Make loaders read the detector's distributions."""
        if self.config.region_classes:
            self.inputs = dataclasses.replace(self.inputs, region_classes=True)

    @abc.abstractmethod
    def embed_regions(self, regions: Tokens, mask: RegionMask | None = None) -> Tokens:
        """Return the image tokens of regions (B, P, F), some of them masked."""

    def read_regions(self, image: Tensor, has_image_B: Tensor | None) -> Tokens:
        """(B, P, F): encode images, or take the regions of a detector."""
        return self.image_input.read(self.image_encoder, image, has_image_B)

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """See the base class."""
        return self.embed_regions(self.read_regions(image, has_image_B))

    def sample_mask(self, batch: Batch) -> RegionMask:
        """Sample masked regions of every image."""
        rate = self.config.region_probability
        return self.image_input.sample_mask(self.image_encoder, batch, rate, zeros=self.zeros, replaced=self.replaced)

    def mask_of(self, corruption: Corruption) -> RegionMask | None:
        """Return the mask of the first objective that has one."""
        names = [objective.name for objective in self.objectives if isinstance(objective, RegionObjective)]
        return next((corruption.parts[name] for name in names if name in corruption.parts), None)

    def encode_tasks(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse masked texts with their images, whole texts with sampled images and with images with masked regions.

        Parts that the step's objectives do not need are left out; the others are computed in one pass.
        """
        words, pairs = (corruption.parts.get(name) for name in (self.mlm.name, self.itm.name))
        mask = self.mask_of(corruption)
        regions = self.read_regions(self.image_input_of(batch), batch.has_image_B)
        image, text = self.embed_regions(regions), self.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)
        passes: dict[str, tuple[Tokens, Tokens]] = {}
        if words is not None:
            passes["words"] = (self.masked_text_tokens(batch, words.ids_BT), image)
        if pairs is not None:
            passes["pairs"] = (text.rows(pairs.text_N), image.rows(pairs.image_N))
        if mask is not None:
            passes["regions"] = (text, self.embed_regions(regions, mask))
        fused = dict(zip(passes, self.fuse_all(*passes.values()), strict=True))
        none_0D, width = text.states_BND[:0, 0], batch.ids_BT.shape[1]
        return Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=none_0D if words is None else self.word_states(fused["words"], words.position_N, width),
            pooled_MD=none_0D if pairs is None else fused["pairs"].pooled_BD,
            pairs=fused.get("pairs"),
            matched_M=None if pairs is None else pairs.matched_N,
            regions=None if mask is None else self.masked_regions(fused["regions"], regions, mask, batch),
        )

    def masked_regions(
        self, fused: Fused, regions: Tokens, mask: RegionMask, batch: Batch, image_B: Tensor | None = None
    ) -> MaskedRegions:
        """Return the fused states of masked regions and the truth; `image_B` is the image of each row of `fused`."""
        states_BPD, classes_BPK = fused.image.states_BND, batch.region_classes_BPK
        truth_BPD = regions.states_BND[:, :, : self.image_input.features].detach()
        masked_BP = mask.masked_BP
        if masked_BP.shape != truth_BPD.shape[:2]:  # no sample has an image
            none_0K = None if classes_BPK is None else classes_BPK[:0, 0]
            return MaskedRegions(states_BPD[:0, 0], truth_BPD[:0, 0], none_0K)
        if image_B is not None:
            masked_BP, truth_BPD = masked_BP[image_B], truth_BPD[image_B]
            classes_BPK = None if classes_BPK is None else classes_BPK[image_B]
        classes_NK = None if classes_BPK is None else classes_BPK[masked_BP]
        return MaskedRegions(states_BPD[masked_BP], truth_BPD[masked_BP], classes_NK)


class RegionHead(nn.Sequential):
    """The layers below the predictions of a region, as those of BERT's words, and a linear layer unless it is None."""

    def __init__(self, width: int, values: int | None = None) -> None:
        layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=LAYER_NORM_EPS)]
        super().__init__(*layers, *([] if values is None else [nn.Linear(width, values)]))
        init_weights(self)


class TiedRegionHead(nn.Module):
    """The same layers; the linear one is the transpose of a matrix (D, F) that reads features, passed to `forward`.

    Attributes:
        mask_vector: (F,), added to the features of masked regions (UNITER's released code).
    """

    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.bias = nn.Parameter(torch.zeros(values))
        self.mask_vector = nn.Parameter(torch.empty(values).normal_(std=INIT_STD))
        init_weights(self)

    def forward(self, states_ND: Tensor, table_DF: Tensor) -> Tensor:
        """(N, F): predicted features."""
        return F.linear(self.norm(F.gelu(self.dense(states_ND))), table_DF.T, self.bias)
