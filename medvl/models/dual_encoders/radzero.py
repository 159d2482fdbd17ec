"""RadZero: statements compared with the patches of an image (Park et al., arXiv 2504.07416,
NeurIPS 2025).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder, freeze_layers
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.losses.local.within_sample import patch_cosine, statement_contrast
from medvl.losses.pairs.blockwise import text_ids
from medvl.models.dual_encoders.bases.base import (
    BertDualConfig,
    DualEncoder,
    ScaleConfig,
)
from medvl.models.dual_encoders.bases.local import local_features
from medvl.models.dual_encoders.bases.pairs import BoxConfig, LabelMapConfig, Pairs
from medvl.models.heatmaps import maps_of_cells
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, ImageFeatures, Inputs, Losses


def token_layers(encoder: ImageEncoder, count: int, eps: float = 1e-5) -> nn.Sequential:
    """Return pre-norm layers as wide as an encoder's patches, with heads 64 wide and norms with
    this epsilon.

    Raises ConfigError for an image encoder whose vector is not as wide as its patches.
    """
    from timm.models.vision_transformer import Block

    width = encoder.patch_dim
    if encoder.feature_dim != width:
        message = (
            f"{encoder.name} has {width} dimensions per patch and {encoder.feature_dim} per image"
        )
        raise ConfigError(
            f"{message}: use one with equal widths", "unsupported", field="image_encoder"
        )
    options: dict[str, Any] = {
        "dim": width,
        "num_heads": max(1, width // 64),
        "qkv_bias": True,
        "init_values": 1.0,
    }
    options["norm_layer"] = functools.partial(nn.LayerNorm, eps=eps)
    return nn.Sequential(*(Block(**options) for _ in range(count)))


# Statements of a batch as rows of a side of `Pairs`, each encoded once, and their comparison over
# all ranks.


def embed_statements(batch: Batch, embed: Callable[[Tensor, Tensor], Embeddings]) -> Embeddings:
    """Return one row a statement, in order, with the number of its sample in `pair_N` and its text
    in `group_N`.

    Equal statements of the batch are encoded once. Without any statement there is no row, but the
    encoder has run, so that DDP gets its gradients. Waits for the device. Raises ConfigError for a
    batch without `statement_ids_BST`.
    """
    ids_BST = batch.statement_ids_BST
    mask_BST = batch.statement_mask_BST
    if ids_BST is None or mask_BST is None:
        message = "expected Batch.statement_ids_BST: open the loader with inputs=model.inputs"
        raise ConfigError(message, "missing", field="statement_ids_BST")
    real_BS = mask_BST.any(dim=2)
    pair_N = real_BS.nonzero()[:, 0]
    ids_NT = ids_BST[real_BS]
    mask_NT = mask_BST[real_BS]
    if not len(pair_N):
        embedded = embed(ids_BST[:1, 0], mask_BST[:1, 0])
        return dataclasses.replace(_rows(embedded, pair_N), pair_N=pair_N, group_N=pair_N)
    group_N = text_ids(ids_NT, mask_NT)
    first_U, column_N = first_of_equal(group_N)
    embedded = embed(ids_NT[first_U], mask_NT[first_U])
    return dataclasses.replace(_rows(embedded, column_N), pair_N=pair_N, group_N=group_N)


def distinct_statements(
    statements: Embeddings, images: int, *, merge: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (U, E), the vectors of statements, and (images, U) bool: whether an image has a
    statement.

    Args:
        statements: rows of `embed_statements`, of all ranks.
        images: number of images of all ranks.
        merge: make equal statements one column, which is a positive of all their images.
    """
    pair_N = statements.pair_N
    group_N = statements.group_N
    assert pair_N is not None, "embed_statements numbers samples"
    assert group_N is not None, "embed_statements numbers texts"
    first_U, column_N = first_of_equal(
        group_N if merge else torch.arange(len(group_N), device=group_N.device)
    )
    positive_NU = torch.zeros(images, len(first_U), dtype=torch.bool, device=pair_N.device)
    positive_NU[pair_N, column_N] = True
    return statements.global_NE[first_U], positive_NU


def first_of_equal(group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U,), the first row of each group in the order of their numbers, and (N,), the
    group of each row.
    """
    known_U, column_N = torch.unique(group_N, return_inverse=True)
    row_N = torch.arange(len(group_N), device=group_N.device)
    first_U = row_N.new_full((len(known_U),), len(group_N)).scatter_reduce(
        0, column_N, row_N, "amin"
    )
    return first_U, column_N


def _rows(side: Embeddings, index_N: Tensor) -> Embeddings:
    tensors = (side.local_NPE, side.mask_NP, side.weight_NP)
    return Embeddings(
        side.global_NE[index_N], *(None if x is None else x[index_N] for x in tensors)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RadZeroConfig(BertDualConfig, ScaleConfig, BoxConfig, LabelMapConfig):
    """Settings of the paper and the released code, with RAD-DINO, which the paper reports as its
    best start.

    The shared space has the image encoder's width; `projection_dim` has no meaning. A text encoder
    of another width gets a linear layer, which the published one of 768 does not need.
    """

    trained_layers: int = 2
    """Transformer layers above the image encoder, as wide as its patches."""
    layer_norm_eps: float = 1e-5
    """Epsilon of the norms of these layers; DINOv2's, and that of the released RadZero, is 1e-6."""
    frozen_image: bool = True
    """Do not train the image encoder."""
    image_encoder: str = "rad_dino"
    text_encoder: str = "mpnet"
    image_size: int = 518
    max_scale: float | None = None
    equal_are_positives: bool = True
    """An image's statement is a positive of all images that have it. False, as published, makes
    "There is no pleural effusion." of one study a negative of another one, although canonical
    sentences repeat.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "trained_layers", "box_weight", "label_map_weight")
        check_within(self, "(0, inf)", "layer_norm_eps", "label_map_sharpness")


@register_system("radzero")
class RadZero(DualEncoder):
    """Each statement against the mean of an image's tokens that it attends to (VL-CABS, section
    3.2).

    The loss is the mean of the contrast of a statement over images and of an image over statements,
    as in the released code; the paper has their sum. The released code takes exponentials without a
    log-sum-exp, so that hard pairs have no gradient and a scale above 88 overflows; here they do
    not. Images are their class token (or the encoder's vector) and patches behind trained layers.
    With `box_weight`, the scaled cosines of a phrase with the patches are the log-odds of its
    boxes; with `label_map_weight`, those of a label's text, pooled, are the log-odds of the label.

    Attributes:
        layers, norm: the layers (`token_layers`), and the norm behind them.
    """

    Config = RadZeroConfig
    inputs = Inputs(statements=True)
    learns_scale = True
    reads_features = True
    zero_shot_prompts = "statements"
    attention_maps = maps_of_cells
    map_log_odds = True

    def __init__(
        self, config: Any, *args: Any, layers: nn.Module, norm: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.layers = layers
        self.norm = norm

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        model = super().build(config, pretrained=pretrained, tokenizer=tokenizer)
        if config.frozen_image:
            freeze_layers(model.image_encoder, "all")
        return model

    @classmethod
    def encoder_arguments(
        cls, config: RadZeroConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {}, {"pool": "mean"}

    @classmethod
    def make_heads(
        cls, config: RadZeroConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        """Raises ConfigError for an image encoder whose vector is not as
        wide as its patches.
        """
        width = image_encoder.patch_dim
        text_width = text_encoder.feature_dim
        return {
            "image_head": nn.Identity(),
            "text_head": nn.Identity() if text_width == width else nn.Linear(text_width, width),
            "layers": token_layers(image_encoder, config.trained_layers, config.layer_norm_eps),
            "norm": nn.LayerNorm(width),
        }

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """Return the class token behind the trained layers."""
        return self._tokens(self.image_encoder(image_BCHW))[:, 0]

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them; `local_NPE` has the class token (or mean)
        and the patches.
        """
        return self.embed_features(self.image_encoder(image_BCHW))

    def embed_features(self, features: ImageFeatures) -> Embeddings:
        """Return images as `embed_images` does, from the output of the image encoder."""
        tokens_BKD = F.normalize(self._tokens(features), dim=2)
        return Embeddings(tokens_BKD[:, 0], tokens_BKD)

    def embed_regions(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, E): the patches, in the space of texts."""
        return local_features(self.embed_images(image_BCHW))[0][:, 1:]

    def _tokens(self, features: ImageFeatures) -> Tensor:
        """Return (B, 1 + P, D) float32, not normalised."""
        assert features.patches_BPD is not None, "token_layers requires patches"
        tokens_BKD = torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
        normed_BKD: Tensor = self.norm(self.layers(tokens_BKD))
        return normed_BKD.float()

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Normalise with the norm of the image's tokens."""
        normed_BE: Tensor = self.norm(super().unnormalized_text(texts, mask_BT))
        return normed_BE.float()

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the cosine of each text with its attended patches of each image."""
        image, text = self.embedded(images, texts)
        return patch_cosine(local_features(image)[0], text.global_NE, self.logit_scale.exp())

    def embed_pairs(self, batch: Batch) -> Pairs:
        images = self.embed_features(self.image_features(batch))
        return Pairs(texts=embed_statements(batch, self.embed_ids), images=images)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Compare a rank's own images with the statements of all ranks."""
        every = pairs.gather(local=False)
        scale = self.scale()
        texts_UE, positive_NU = distinct_statements(
            every.texts, len(every), merge=self.config.equal_are_positives
        )
        logits_NU = scale * gather(patch_cosine(local_features(pairs.images)[0], texts_UE, scale))
        to_image, to_statement = statement_contrast(logits_NU, positive_NU)
        return Losses.weighted(
            statement_to_image=(to_image, 0.5), image_to_statement=(to_statement, 0.5)
        )

    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the scaled cosine of every patch, the log-odds of published masks.

        Published code takes the sigmoid behind the interpolation, and for masks alone
        (`medvl.eval.zero_shot_masks` with scale "sigmoid"): high log-odds have a sigmoid of 1, in
        which the maximum is lost.
        """
        return self.text_maps(self.embed_images(image_BCHW), self.embed_texts(texts))

    def text_maps(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (B, P): `cell_maps` of embeddings, text i in image i."""
        patches_BPE = local_features(images)[0][:, 1:]
        return self.logit_scale.exp() * (patches_BPE @ texts.global_NE[:, :, None]).squeeze(2)

    def text_scores(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (B, M, P): `text_maps` of every text in every image."""
        patches_BPE = local_features(images)[0][:, 1:]
        return self.logit_scale.exp() * torch.einsum("bpe,me->bmp", patches_BPE, texts.global_NE)
