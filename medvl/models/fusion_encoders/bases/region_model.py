"""The base of systems that read regions with boxes and predict masked ones (UNITER, LXMERT).

P regions, F features with their box code; the other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders.regions import BoxCode, RegionEncoder, box_code
from medvl.errors import ConfigError
from medvl.models.base import INIT_STD, LAYER_NORM_EPS, init_weights
from medvl.models.fusion_encoders.bases.base import FusionConfig, FusionModel
from medvl.models.fusion_encoders.bases.objectives import (
    Corruption,
    Encoded,
    MaskedRegions,
    Objective,
)
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource, encode_present
from medvl.schema import Batch

# Regions as UNITER and LXMERT read them: features and box codes, of a detector or of the cells of
# a grid.
#
# P regions, F features with their box code after them, C numbers of a box code; the other letters
# as in `medvl.schema`.


class RegionMask(NamedTuple):
    """Regions to predict, and the regions whose features the model reads in their place."""

    masked_BP: Tensor
    """bool."""
    source_BP: Tensor
    """int64: place in the flattened (B * P) regions of the features that are read; -1: zeros."""


def sample_region_mask(
    real_BP: Tensor, rate: float, *, zeros: float = 1.0, replaced: float = 0.0
) -> RegionMask:
    """Mask each real region with a probability of `rate`, and at least one of each image (UNITER).

    Sampled from torch's CPU generator. Of the masked regions, a share of `zeros` has zeros as
    features, a share of `replaced` those of a random region of the batch, the rest its own (LXMERT:
    0.8 and 0.1).
    """
    rank_BP, kind_BP = torch.rand(2, *real_BP.shape, generator=torch.default_generator).to(
        real_BP.device
    )
    first_B1 = rank_BP.masked_fill(~real_BP, 2.0).argmin(dim=1, keepdim=True)
    masked_BP = real_BP & (rank_BP < rate).scatter(1, first_B1, True)
    own_BP = torch.arange(real_BP.numel(), device=real_BP.device).view_as(real_BP)
    other = torch.randint(
        max(real_BP.numel(), 1), tuple(real_BP.shape), generator=torch.default_generator
    )
    source_BP = torch.where(kind_BP < zeros + replaced, other.to(real_BP.device), own_BP)
    return RegionMask(
        masked_BP, torch.where(masked_BP, source_BP.masked_fill(kind_BP < zeros, -1), own_BP)
    )


class RegionInput(nn.Module):
    """Projections of features and of box codes, each normalised, and their sum (UNITER, 3.1;
    LXMERT, equation 1).

    Args:
        source: detector's regions with a box code of `numbers`, or an image encoder, whose cells
            have boxes.
        numbers: length of a box code.
        width: D of the tokens.

    Attributes:
        features: width of a region's features.

    Raises ConfigError for regions without that box code.
    """

    def __init__(self, source: ImageSource, numbers: BoxCode, width: int) -> None:
        super().__init__()
        if isinstance(source, RegionEncoder) and source.code != numbers:
            message = f"expected regions with a box code, regions:WIDTH+{numbers}"
            raise ConfigError(message, "mismatch", field="image_encoder")
        self.numbers: BoxCode = numbers
        self.features = source.patch_dim - (numbers if isinstance(source, RegionEncoder) else 0)
        self.project = nn.Linear(self.features, width)
        self.project_boxes = nn.Linear(numbers, width)
        self.norm, self.norm_boxes = (nn.LayerNorm(width, eps=LAYER_NORM_EPS) for _ in range(2))

    def read(self, source: ImageSource, image: Tensor, has_image_B: Tensor | None) -> Tokens:
        """Encode images, or take the regions of a detector: (B, P, F), padding if there is no
        image.
        """

        def encode(image: Tensor) -> Tokens:
            features = source(image)
            if isinstance(source, RegionEncoder):
                return Tokens(features.patches_BPD, source.real(image))
            codes_PC = box_code(grid_boxes(*features.plane), self.numbers).to(features.patches_BPD)
            codes_BPC = codes_PC.expand(len(features.patches_BPD), -1, -1)
            return Tokens(torch.cat([features.patches_BPD, codes_BPC], dim=2), None)

        tokens = encode_present(has_image_B, self.features + self.numbers, encode, image)
        if has_image_B is None:
            return tokens
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])

    def sample_mask(
        self, source: ImageSource, batch: Batch, rate: float, **shares: float
    ) -> RegionMask:
        """Sample masked regions of a batch, see `sample_region_mask`."""
        if isinstance(source, RegionEncoder):
            real_BP = source.real(source.read(batch))
        else:
            height, width = source.grid(*batch.image_BCHW.shape[2:])
            real_BP = torch.ones(
                len(batch), height * width, dtype=torch.bool, device=batch.image_BCHW.device
            )
        if batch.has_image_B is not None:
            real_BP = real_BP & batch.has_image_B[:, None]
        return sample_region_mask(real_BP, rate, **shares)

    def forward(
        self, regions_BPF: Tensor, mask: RegionMask | None = None, added_D: Tensor | None = None
    ) -> Tensor:
        """(B, P, D): embed regions, some of them masked; `added_D` is added to the features of
        those.
        """
        features_BPD, codes_BPC = regions_BPF.split([self.features, self.numbers], dim=2)
        # else no sample has an image
        if mask is not None and mask.source_BP.shape == features_BPD.shape[:2]:
            source_BP1 = mask.source_BP[:, :, None]
            read_BPD = features_BPD.flatten(0, 1)[mask.source_BP.clamp(min=0)]
            features_BPD = read_BPD.masked_fill(source_BP1 < 0, 0.0)
            if added_D is not None:
                features_BPD = features_BPD + added_D * mask.masked_BP[:, :, None]
        states_BPD: Tensor = self.norm(self.project(features_BPD)) + self.norm_boxes(
            self.project_boxes(codes_BPC)
        )
        return states_BPD


def grid_boxes(height: int, width: int) -> Tensor:
    """(P, 4): relative boxes (left, top, right, bottom) of the cells of a grid, in row-major
    order.
    """
    row_P = torch.arange(height).repeat_interleave(width)
    column_P = torch.arange(width).repeat(height)
    places = (column_P / width, row_P / height, (column_P + 1) / width, (row_P + 1) / height)
    return torch.stack(places, dim=1)


# Masked regions: their features, and the detector's distribution over its classes.
#
# N masked regions, D width, K classes.

RegionPredictions = tuple[Tensor, MaskedRegions]
"""Predictions of the head for the masked regions, and the truth."""


class RegionObjective(Objective[Encoded, RegionMask, RegionPredictions]):
    """Prediction of masked regions from their fused states.

    The regions that one pass masks serve all such objectives of a step; the first of them samples.

    Args:
        weight: factor of the term.
        sample_mask: samples the masked regions of a batch.
        head: maps states (N, D) to predictions.
    """

    def __init__(
        self,
        weight: float,
        sample_mask: Callable[[Batch], RegionMask],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_mask = sample_mask
        self.head = head

    def corrupt(self, batch: Batch) -> RegionMask:
        """Sample masked regions of every image."""
        return self.sample_mask(batch)

    def predict(self, encoded: Encoded, corruption: RegionMask) -> RegionPredictions:
        """Predict the masked regions."""
        assert encoded.regions is not None, "the model fuses masked regions"
        return self.head(encoded.regions.states_ND), encoded.regions


class MaskedRegionRegression(RegionObjective):
    """Squared error of the masked regions' features (UNITER's MRFR)."""

    name = "mrfr"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Return the mean over masked regions and their features."""
        return losses.region_regression(predictions[0], predictions[1].features_ND)


class MaskedRegionFeatures(RegionObjective):
    """Smooth L1 error of the masked regions' features (LXMERT)."""

    name = "region_features"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Return the mean over masked regions and their features."""
        return losses.region_regression(predictions[0], predictions[1].features_ND, smooth=True)


class MaskedRegionClassification(RegionObjective):
    """Divergence from the detector's distribution over its classes (UNITER's MRC-kl)."""

    name = "mrc"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Return the mean over masked regions."""
        return losses.region_kl(predictions[0], classes_of(predictions[1]))


class MaskedObjectLabels(RegionObjective):
    """The detector's best class of the masked regions, weighted by its confidence (LXMERT)."""

    name = "object_labels"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Return the mean over masked regions."""
        return losses.region_labels(predictions[0], classes_of(predictions[1]))


def classes_of(regions: MaskedRegions) -> Tensor:
    """(N, K). Raises ConfigError for a batch without the detector's distributions."""
    if regions.classes_NK is None:
        message = (
            "region_classes needs regions of a detector with its distributions "
            "(Inputs.region_classes)"
        )
        raise ConfigError(message, "missing", field="region_classes_BPK")
    return regions.classes_NK


REGION_PROBABILITY = 0.15
"""Share of regions that are masked, at least one of each image, as in UNITER and LXMERT."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionConfig(FusionConfig):
    """Settings of systems with masked regions.

    The papers' regions are of a frozen detector: `image_encoder="regions:WIDTH+CODE"`. By default
    they are the cells of an image encoder's grid, which is trained by the other objectives; true
    features have no gradient.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 224
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    region_classes: int = 0
    """Classes of the detector, whose distribution is predicted; 0: not predicted, as for cells
    of a grid.
    """
    region_feature_weight: float = 1.0
    """Weight of the features of masked regions (UNITER's MRFR)."""
    region_class_weight: float = 1.0
    """Weight of the detector's classes of masked regions (UNITER's MRC, LXMERT's labels)."""
    former = (("region_probability", REGION_PROBABILITY),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "region_feature_weight", "region_class_weight")
        check_within(self, "[0, inf)", "region_classes")


class RegionModel(FusionModel):
    """A system whose `image_input` is a `RegionInput`; `embed_regions` makes image tokens of its
    regions.
    """

    image_input: RegionInput
    image_encoder: ImageSource
    zeros: ClassVar[float] = 1.0
    replaced: ClassVar[float] = 0.0
    """Shares of the masked regions that are read as zeros, and as other regions
    (`sample_region_mask`).
    """

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
        return self.embed_regions(self.read_regions(image, has_image_B))

    def sample_mask(self, batch: Batch) -> RegionMask:
        """Sample masked regions of every image."""
        return self.image_input.sample_mask(
            self.image_encoder,
            batch,
            REGION_PROBABILITY,
            zeros=self.zeros,
            replaced=self.replaced,
        )

    def mask_of(self, corruption: Corruption) -> RegionMask | None:
        """Return the mask of the first objective that has one."""
        names = [
            objective.name
            for objective in self.objectives
            if isinstance(objective, RegionObjective)
        ]
        return next((corruption.parts[name] for name in names if name in corruption.parts), None)

    def encode_tasks(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse masked texts with their images, whole texts with sampled images and with images with
        masked regions.

        Parts that the step's objectives do not need are left out; the others are computed in one
        pass.
        """
        words, pairs = (corruption.parts.get(name) for name in (self.mlm.name, self.itm.name))
        mask = self.mask_of(corruption)
        regions = self.read_regions(self.image_input_of(batch), batch.has_image_B)
        image = self.embed_regions(regions)
        text = self.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)
        passes: dict[str, tuple[Tokens, Tokens]] = {}
        if words is not None:
            passes["words"] = (self.masked_text_tokens(batch, words.ids_BT), image)
        if pairs is not None:
            passes["pairs"] = (text.rows(pairs.text_N), image.rows(pairs.image_N))
        if mask is not None:
            passes["regions"] = (text, self.embed_regions(regions, mask))
        fused = dict(zip(passes, self.fuse_all(*passes.values()), strict=True))
        none_0D = text.states_BND[:0, 0]
        width = batch.ids_BT.shape[1]
        return Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=none_0D
            if words is None
            else self.word_states(fused["words"], words.position_N, width),
            pooled_MD=none_0D if pairs is None else fused["pairs"].pooled_BD,
            pairs=fused.get("pairs"),
            matched_M=None if pairs is None else pairs.matched_N,
            regions=None
            if mask is None
            else self.masked_regions(fused["regions"], regions, mask, batch),
        )

    def masked_regions(
        self,
        fused: Fused,
        regions: Tokens,
        mask: RegionMask,
        batch: Batch,
        image_B: Tensor | None = None,
    ) -> MaskedRegions:
        """Return the fused states of masked regions and the truth; `image_B` is the image of
        each row of `fused`.
        """
        states_BPD = fused.image.states_BND
        classes_BPK = batch.region_classes_BPK
        truth_BPD = regions.states_BND[:, :, : self.image_input.features].detach()
        masked_BP = mask.masked_BP
        if masked_BP.shape != truth_BPD.shape[:2]:  # no sample has an image
            none_0K = None if classes_BPK is None else classes_BPK[:0, 0]
            return MaskedRegions(states_BPD[:0, 0], truth_BPD[:0, 0], none_0K)
        if image_B is not None:
            masked_BP = masked_BP[image_B]
            truth_BPD = truth_BPD[image_B]
            classes_BPK = None if classes_BPK is None else classes_BPK[image_B]
        classes_NK = None if classes_BPK is None else classes_BPK[masked_BP]
        return MaskedRegions(states_BPD[masked_BP], truth_BPD[masked_BP], classes_NK)


class RegionHead(nn.Sequential):
    """The layers below the predictions of a region, as those of BERT's words, and a linear layer
    unless it is None.
    """

    def __init__(self, width: int, values: int | None = None) -> None:
        layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=LAYER_NORM_EPS)]
        super().__init__(*layers, *([] if values is None else [nn.Linear(width, values)]))
        init_weights(self)


class TiedRegionHead(nn.Module):
    """The same layers; the linear one is the transpose of a matrix (D, F) that reads features,
    passed to `forward`.

    Attributes:
        mask_vector: (F,), added to the features of masked regions (UNITER's released code).
    """

    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.bias = nn.Parameter(torch.zeros(values))
        self.mask_vector = nn.Parameter(torch.empty(values).normal_(std=INIT_STD))
        init_weights(self)

    def forward(self, states_ND: Tensor, table_DF: Tensor) -> Tensor:
        """(N, F): predicted features."""
        return F.linear(self.norm(F.gelu(self.dense(states_ND))), table_DF.T, self.bias)
