"""fVLM: contrast of chest CTs and reports organ by organ (Shui et al., ICLR 2025)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice
from medvl.data.reports.organs import split_by_organ
from medvl.data.volumes.transform import VolumeTransform
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.losses.pairs.blockwise import text_ids
from medvl.models.base import list_of_texts
from medvl.models.dual_encoders.bases.base import TemperatureConfig
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_side
from medvl.models.registry import register_system
from medvl.models.volumes.base import VolumeDualConfig, VolumeDualEncoder, volumes_of
from medvl.schema import ORGANS, Batch, Embeddings, Losses

OrganTokens = Literal["mask", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FVLMConfig(VolumeDualConfig, TemperatureConfig):
    """Settings of the released model: 112 x 256 x 352 voxels of 3 x 1 x 1 mm.

    Its code learns the temperature itself, here its logarithm, within the same bounds. Its
    positions are learned, and its filters start at random; here positions are fixed and filters are
    MAE's, inflated as in HLIP. Its class token is not used.

    All organs of a volume have one crop, around the middle of the box of all organs. The released
    code trains on crops around the box of the lungs; its evaluation crops around each organ apart,
    as large as the organ, in a forward pass for each. Training leaves out organs that the crop
    cuts; inference compares what the crop shows of them.
    """

    image_arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "patch_size": (16, 16, 32),
            "attention": ("study",) * 12,
            "window": (-1150.0, 350.0),
            "mean": 0.0,
            "std": 1.0,
            "dropout": 0.1,
            "layers": (3, 6, 9),
        }
    )
    volume_size: tuple[int, int, int] = (112, 256, 352)
    text_encoder: str = "cxrbert"
    projection_dim: int = 256
    max_tokens: int = 175
    max_scale: float | None = 1000.0
    min_scale: float | None = 2.0
    organ_heads: int = 4
    """Attention heads of the queries."""
    organ_dropout: float = 0.1
    """Dropout of their attention."""
    organ_tokens: OrganTokens = "mask"
    """Patches that the query of an organ attends to: those within its mask, as published; or all of
    them, for volumes without masks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.organ_tokens, get_args(OrganTokens), "organ_tokens")

    def transform(self) -> VolumeTransform:
        """Return the cut of a volume and of its masks for inference."""
        return VolumeTransform(size=self.volume_size, organs=self.organ_tokens == "mask")


class OrganQueries(nn.Module):
    """One learned query an organ, which attends to the organ's patches of several layers, and a
    linear layer of its own.
    """

    def __init__(self, width: int, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.zeros(len(ORGANS), width))
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.projections = nn.ModuleList(nn.Linear(width, size) for _ in ORGANS)

    def forward(
        self, patches_BPD: Tensor, mask_BOP: Tensor | None, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (B, O, E), and with `need_weights` the attention (B, O, P), averaged over heads.

        Where the mask of an organ is empty, its query attends to all patches.
        """
        query_BOD = self.query_tokens.expand(len(patches_BPD), -1, -1).to(patches_BPD.dtype)
        seen_BOD, weights_BOP = self.attention(
            query_BOD,
            patches_BPD,
            patches_BPD,
            attn_mask=self._hidden(mask_BOP),
            need_weights=need_weights,
        )
        projected = [layer(seen_BOD[:, organ]) for organ, layer in enumerate(self.projections)]
        return torch.stack(projected, dim=1), weights_BOP

    def shares(self, patches_BPD: Tensor, mask_BOP: Tensor | None) -> Tensor:
        """Return (B, O, P, E): the share of each patch in the vectors of `forward`, which are their
        sums over patches. Without dropout.
        """
        heads = self.attention.num_heads
        query_BOD = self.query_tokens.expand(len(patches_BPD), -1, -1).to(patches_BPD.dtype)
        weights_BhOP = self.attention(
            query_BOD,
            patches_BPD,
            patches_BPD,
            attn_mask=self._hidden(mask_BOP),
            average_attn_weights=False,
        )[1]
        value_BPD = F.linear(
            patches_BPD,
            self.attention.in_proj_weight.chunk(3)[2],
            self.attention.in_proj_bias.chunk(3)[2],
        )
        value_BhPK = value_BPD.unflatten(2, (heads, -1)).transpose(1, 2)
        part_BOPD = torch.einsum("bhop,bhpk->bophk", weights_BhOP, value_BhPK).flatten(3)
        # biases are shared out by the attention, whose sum over patches is one
        weight_BOP1 = weights_BhOP.mean(dim=1)[..., None]
        output = self.attention.out_proj
        projections: Any = self.projections
        part_BOPD = F.linear(part_BOPD, output.weight) + weight_BOP1 * output.bias
        shares = [
            F.linear(part_BOPD[:, organ], layer.weight) + weight_BOP1[:, organ] * layer.bias
            for organ, layer in enumerate(projections)
        ]
        return torch.stack(shares, dim=1)

    def _hidden(self, mask_BOP: Tensor | None) -> Tensor | None:
        """Return the patches that each query does not attend to, repeated for all heads; None: it
        attends to all.
        """
        if mask_BOP is None:
            return None
        hidden_BOP = ~mask_BOP & mask_BOP.any(dim=2, keepdim=True)
        return hidden_BOP.repeat_interleave(self.attention.num_heads, dim=0)


@register_system("fvlm")
class FVLM(VolumeDualEncoder):
    """Vectors of lung, heart, esophagus and aorta, each compared with its own text.

    The vector of an image has those of the organs one after another, of unit length each, or zeros
    for an organ without a voxel; that of a text has its vector at the organs that it names, or at
    all where it names none. `similarity` is the mean of the cosines of a text's organs. A text that
    names several organs is parted (`medvl.data.reports.organs`); token ids are compared with all.
    """

    Config = FVLMConfig
    learns_scale = True
    needs_pairs = False
    trains_pooled = False
    zero_shot_prompts = "fvlm"
    image_head: OrganQueries

    def __init__(self, config: FVLMConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = dataclasses.replace(self.inputs, organs=True)

    @classmethod
    def make_heads(
        cls, config: FVLMConfig, image_encoder: Any, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        size = config.projection_dim
        return {
            "image_head": OrganQueries(
                image_encoder.patch_dim, size, config.organ_heads, config.organ_dropout
            ),
            "text_head": nn.Linear(text_encoder.feature_dim, size),
        }

    def organ_vectors(
        self, image_BCDHW: Tensor, organ_mask_BDHW: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the unit vector of each organ (B, O, E), and whether the image has it (B, O).

        Args:
            image_BCDHW: volumes (`Batch.image_BCDHW`).
            organ_mask_BDHW: organ of each voxel (`Batch.organ_mask_BDHW`), or None where the
                model's `transform.organs` is False: then all organs attend to all patches.

        Raises:
            ConfigError: "missing" for volumes without the organs that the model needs.
        """
        features = self.image_encoder(image_BCDHW)
        mask_BOP = self._organ_patches(organ_mask_BDHW)
        vector_BOE, _ = self.image_head(features.patches_BPD, self._of_layers(mask_BOP))
        if mask_BOP is None:
            present_BO = image_BCDHW.new_ones(vector_BOE.shape[:2], dtype=torch.bool)
        else:
            present_BO = mask_BOP.any(dim=2)
        return F.normalize(vector_BOE.float(), dim=2), present_BO

    def _of_layers(self, mask_BOP: Tensor | None) -> Tensor | None:
        """Return the mask of patches for those of all layers, one after another."""
        return None if mask_BOP is None else mask_BOP.repeat(1, 1, self.image_encoder.maps)

    def _organ_patches(self, organ_mask_BDHW: Tensor | None) -> Tensor | None:
        """Return the patches with a voxel of each organ (B, O, P), None for all patches."""
        if organ_mask_BDHW is None:
            if getattr(self.transform, "organs", False):
                raise ConfigError(
                    "expected volumes with the organ of each voxel, got volumes alone; convert "
                    "with --organ-masks, or take organ_tokens all",
                    "missing",
                    field="organ_masks",
                )
            return None
        depth, height, width = self.image_encoder.patch_size
        cells = organ_mask_BDHW.unflatten(3, (-1, width)).unflatten(2, (-1, height))
        cells = cells.unflatten(1, (-1, depth))  # B, d, z, h, y, w, x
        masks = [
            (cells == organ).any(dim=6).any(dim=4).any(dim=2).flatten(1)
            for organ in range(1, len(ORGANS) + 1)
        ]
        return torch.stack(masks, dim=1)

    def unnormalized_image(
        self, image_BCDHW: Tensor, organ_mask_BDHW: Tensor | None = None
    ) -> Tensor:
        """Return (B, O * E) float32, the unit vectors of organs."""
        vector_BOE, present_BO = self.organ_vectors(image_BCDHW, organ_mask_BDHW)
        return (vector_BOE * present_BO[:, :, None]).flatten(1)

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Return (B, O * E) float32, the unit vector of a text at its organs, divided by their
        number. Arguments and errors are those of `encode_text`.
        """
        if isinstance(texts, Tensor):
            vector_BE = self._text_vectors(*self.tokenize(texts, mask_BT))
            return vector_BE.repeat(1, len(ORGANS)) / len(ORGANS)
        parts = [_parts_of(text) for text in list_of_texts(texts)]
        distinct = list(dict.fromkeys(part for each in parts for part in each.values()))
        vector_NE = self._text_vectors(*self.tokenize(distinct))
        row = {text: number for number, text in enumerate(distinct)}
        row_BO = torch.tensor([[row[each[organ]] if organ in each else -1 for organ in ORGANS]
                               for each in parts], device=vector_NE.device)  # fmt: skip
        named_BO = (row_BO >= 0)[:, :, None]
        return (vector_NE[row_BO] * named_BO / named_BO.sum(dim=1, keepdim=True)).flatten(1)

    def _text_vectors(self, ids_NT: Tensor, mask_NT: Tensor) -> Tensor:
        projected_NE: Tensor = self.text_head(self.text_encoder(ids_NT, mask_NT).pooled_BD)
        return F.normalize(projected_NE.float(), dim=1)

    def encode_image(
        self,
        image_BCDHW: Tensor,
        organ_mask_BDHW: Tensor | None = None,
        *,
        normalize: bool = True,
    ) -> Tensor:
        vector_BE = self.unnormalized_image(image_BCDHW, organ_mask_BDHW)
        return F.normalize(vector_BE, dim=-1) if normalize else vector_BE

    def embed_images(
        self, image_BCDHW: Tensor, organ_mask_BDHW: Tensor | None = None
    ) -> Embeddings:
        """Return images as `similarity` takes them. Arguments and errors are those of
        `organ_vectors`.
        """
        return Embeddings(self.unnormalized_image(image_BCDHW, organ_mask_BDHW))

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        """Return texts as `similarity` takes them, from token ids and their mask: texts that are
        compared with all organs.
        """
        return Embeddings(self.unnormalized_text(ids_BT, mask_BT))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts as `similarity` takes them. Raises ConfigError without a tokenizer."""
        return Embeddings(self.unnormalized_text(texts))

    def organ_maps(self, image_BCDHW: Tensor, organ_mask_BDHW: Tensor | None = None) -> Tensor:
        """Return (B, O, d, h, w): the share of each patch in the attention of each organ's query,
        summed over layers. Arguments and errors are those of `organ_vectors`.
        """
        features = self.image_encoder(image_BCDHW)
        mask_BOP = self._organ_patches(organ_mask_BDHW)
        maps = self.image_encoder.maps
        _, weights_BOP = self.image_head(
            features.patches_BPD, self._of_layers(mask_BOP), need_weights=True
        )
        depth, height, width = features.grid
        summed_BOP = weights_BOP.unflatten(2, (maps, -1)).sum(dim=2)
        summed_BOP = summed_BOP if mask_BOP is None else summed_BOP * mask_BOP
        shares: Tensor = summed_BOP.unflatten(2, (depth // maps, height, width))
        return shares

    def embed_regions(self, image_BCDHW: Tensor, organ_mask_BDHW: Tensor | None = None) -> Tensor:
        """Return (B, P, O * E) float32: the share of each patch in `unnormalized_image`, their sum
        over patches; 0 outside of an organ's mask.

        The product with a text is the share in `similarity`. Arguments and errors are those of
        `organ_vectors`.
        """
        features = self.image_encoder(image_BCDHW)
        mask_BOP = self._organ_patches(organ_mask_BDHW)
        share_BOPE = self.image_head.shares(features.patches_BPD, self._of_layers(mask_BOP)).float()
        share_BOPE = share_BOPE.unflatten(2, (self.image_encoder.maps, -1)).sum(dim=2)
        length_BO = share_BOPE.sum(dim=2).norm(dim=2)
        share_BOPE = share_BOPE / length_BO[:, :, None, None].clamp(min=1e-12)
        if mask_BOP is not None:
            share_BOPE = share_BOPE * mask_BOP[..., None]
        return share_BOPE.transpose(1, 2).flatten(2)

    def normalize_regions(self, regions_BPE: Tensor) -> Tensor:
        """Return the same regions, whose length is part of their share."""
        return regions_BPE

    def embed_pairs(self, batch: Batch) -> Pairs:
        normal_BO = batch.organ_normal_BO
        if batch.organ_ids_BOT is None or batch.organ_mask_BOT is None or normal_BO is None:
            raise ConfigError(
                "fvlm needs the text of each organ: open the loader with inputs=model.inputs",
                "missing",
                field="organ_ids_BOT",
            )
        ids_NT, mask_NT = batch.organ_ids_BOT.flatten(0, 1), batch.organ_mask_BOT.flatten(0, 1)
        has_text_N = mask_NT.any(dim=1)
        # a text without tokens has one, because an average over none is not finite
        read_NT = mask_NT | (~has_text_N[:, None] & _first_column(mask_NT))
        rows = len(batch.organ_ids_BOT)
        texts = Embeddings(
            self._text_vectors(ids_NT, read_NT),
            pair_N=torch.arange(rows, device=ids_NT.device).repeat_interleave(len(ORGANS)),
            group_N=text_ids(ids_NT, mask_NT),
        )
        organ_mask_BDHW = batch.organ_mask_BDHW
        vector_BOE, present_BO = self.organ_vectors(volumes_of(batch), organ_mask_BDHW)
        present_BO = present_BO & has_text_N.unflatten(0, (rows, -1))
        if organ_mask_BDHW is not None:
            present_BO &= ~cut_organs(organ_mask_BDHW)
        for has_side_B in (batch.has_image_B, batch.has_text_B):
            if has_side_B is not None:
                present_BO &= has_side_B[:, None]
        flags_B2O = torch.cat([present_BO, normal_BO], dim=1).float()
        return Pairs(
            images=Embeddings(vector_BOE.flatten(1)),
            texts=texts,
            others={"organs": Embeddings(flags_B2O)},
        )

    def compare_pairs(self, pairs: Pairs) -> Losses:
        organs = len(ORGANS)
        image_NOE = gather(pairs.images.global_NE).unflatten(1, (organs, -1))
        texts = gather_side(pairs.texts)
        present_NO, normal_NO = gather(pairs.others["organs"].global_NE).bool().chunk(2, dim=1)
        assert texts.group_N is not None, "embed_pairs numbers equal texts"
        loss_O = losses.organ_contrast(
            image_NOE,
            texts.global_NE.unflatten(0, (-1, organs)),
            self.scale(),
            present_NO=present_NO,
            normal_NO=normal_NO,
            text_id_NO=texts.group_N.unflatten(0, (-1, organs)),
        )
        return Losses.sum(**dict(zip(ORGANS, loss_O, strict=True)))


def cut_organs(organ_mask_BDHW: Tensor) -> Tensor:
    """Return (B, O) bool: organs with a voxel on the border, which the crop may have cut."""
    borders = torch.cat(
        [
            organ_mask_BDHW.select(dim, place).flatten(1)
            for dim in (1, 2, 3)
            for place in (0, organ_mask_BDHW.shape[dim] - 1)
        ],
        dim=1,
    )
    numbers_O = torch.arange(1, len(ORGANS) + 1, device=organ_mask_BDHW.device)
    return (borders[:, None] == numbers_O[:, None]).any(dim=2)


def _parts_of(text: str) -> dict[str, str]:
    """Return the parts of a text by organ, or the whole for all organs where it names none."""
    return split_by_organ(text) or dict.fromkeys(ORGANS, text)


def _first_column(mask_NT: Tensor) -> Tensor:
    first_T = torch.zeros(mask_NT.shape[1], dtype=torch.bool, device=mask_NT.device)
    first_T[0] = True
    return first_T
