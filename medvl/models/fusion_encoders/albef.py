"""ALBEF: align before fuse (Li et al., arXiv 2107.07651, NeurIPS 2021). Both a dual-encoder and a fusion-encoder.

N masked positions, K samples with an image and a text; the other letters as in `medvl.schema`.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.losses.gather import gather
from medvl.losses.itc import Keys, MomentumQueue, clamp_temperature_, ramped_alpha
from medvl.losses.itm import MatchingPairs, hard_pairs
from medvl.losses.positives import name_ids
from medvl.models.base import complete_rows
from medvl.models.dual_encoders.base import DualEncoder
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.config import ALBEFConfig
from medvl.models.fusion_encoders.corruption import draw_text, of_rows, same_rows
from medvl.models.fusion_encoders.layers.encoder import AttentionMaps, Fused, Tokens
from medvl.models.fusion_encoders.layers.heads import WordHead
from medvl.models.fusion_encoders.layers.inputs import create_encoders, of_present
from medvl.models.fusion_encoders.layers.transformer import CoAttentionLayer, Sizes, init_weights
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses

_BERT = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "feed_forward.inner": "intermediate.dense",
    "feed_forward.outer": "output.dense",
    "feed_forward.norm": "output.LayerNorm",
}
"""What of a `CoAttentionLayer` a BERT layer has, by its names. Attention to the image it has none."""


class Read(NamedTuple):
    """A batch as the model, or its moving average, reads it."""

    image: Tokens
    text: Tokens
    words_NV: Tensor
    """Scores of the vocabulary at the masked positions, of the masked texts beside their images."""
    image_KE: Tensor
    text_KE: Tensor
    """L2-normalised, float32, of the complete samples, nothing masked."""


def embed(head: nn.Module, tokens: Tokens) -> Tensor:
    """(B, E): the first token in the shared space, L2-normalised, float32."""
    return F.normalize(head(tokens.states_BND[:, 0]).float(), dim=-1)


class Layers(nn.Module):
    """What ALBEF has twice: as it learns, and as a moving average of that."""

    def __init__(
        self,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        image_head: nn.Module,
        text_head: nn.Module,
        fusion: nn.ModuleList,
        mlm_head: WordHead,
    ) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_head, self.text_head = image_head, text_head
        self.fusion, self.mlm_head = fusion, mlm_head

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None) -> Tokens:
        """The class token (or whatever vector the encoder pools), then the patches."""

        def encode(index_K: Tensor | None) -> Tokens:
            features = self.image_encoder(image if index_K is None else image[index_K])
            pooled_B1D = features.pooled_BD[:, None]
            if features.patches_BPD is None:
                return Tokens(pooled_B1D, None)
            return Tokens(torch.cat([pooled_B1D, features.patches_BPD], dim=1), None)

        return of_present(has_image_B, self.image_encoder.feature_dim, encode)

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None) -> Tokens:
        """The class token, then the others."""

        def encode(index_K: Tensor | None) -> Tokens:
            ids, mask = (ids_BT, mask_BT) if index_K is None else (ids_BT[index_K], mask_BT[index_K])
            features = self.text_encoder(ids, mask)
            return Tokens(features.tokens_BTD, features.mask_BT)

        return of_present(has_text_B, self.text_encoder.token_dim, encode)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """The text looks at the image, which stays as it is; a pair's vector is the class token's state."""
        states_BTD = self._fused(text, image, len(self.fusion))
        return Fused(Tokens(states_BTD, text.mask_BN), image, states_BTD[:, 0])

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Over all of the image's tokens; the pooled token is the text's first one."""
        states_BTD = self._fused(text, image, len(self.fusion) - 1)
        last: Any = self.fusion[-1]
        weights_BTP = last.cross_weights(states_BTD, image.states_BND, text.mask_BN, image.mask_BN)
        return AttentionMaps(weights_BTP[:, 0], weights_BTP)

    def _fused(self, text: Tokens, image: Tokens, depth: int) -> Tensor:
        """The text's states after the first `depth` layers."""
        states_BTD = text.states_BND
        for layer in self.fusion[:depth]:
            states_BTD = layer(states_BTD, image.states_BND, text.mask_BN, image.mask_BN)
        return states_BTD

    def read(self, batch: Batch, masked_ids_BT: Tensor, masked_N: Tensor, row_K: Tensor) -> Read:
        """Each image once; each text once as it is and once with its masks, in one pass."""
        image = self.image_tokens(batch.image_BCHW, batch.has_image_B)
        twice = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        both = self.text_tokens(torch.cat([batch.ids_BT, masked_ids_BT]), batch.mask_BT.repeat(2, 1), twice)
        row_B = torch.arange(len(batch), device=masked_ids_BT.device)
        text, masked = both.rows(row_B), both.rows(row_B + len(batch))
        states_ND = self.fuse(masked, image).text.states_BND.flatten(0, 1)[masked_N]
        backbone: Any = self.text_encoder.backbone
        return Read(
            image=image,
            text=text,
            words_NV=self.mlm_head(states_ND, backbone.get_input_embeddings().weight),
            image_KE=embed(self.image_head, image.rows(row_K)),
            text_KE=embed(self.text_head, text.rows(row_K)),
        )


class ContrastHead(nn.Module):
    """The contrastive loss with what it keeps from step to step: a learned temperature, and a queue of past pairs."""

    def __init__(self, config: ALBEFConfig) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(config.temperature))
        self.queue = MomentumQueue(config.queue_size, config.projection_dim)

    def forward(self, learner: Read, teacher: Read, names_K: Tensor, alpha: float) -> Tensor:
        """Over the complete samples of all ranks, and the queue; without the queue in eval mode, where a batch is
        judged by itself."""
        image_NE, text_NE = gather(teacher.image_KE), gather(teacher.text_KE)
        names_N = gather(names_K)
        if self.training:
            keys = self.queue.keys(image_NE, text_NE, names_N)
            self.queue.enqueue(image_NE, text_NE, names_N)
        else:
            keys = Keys(image_NE, text_NE, names_N[:, None] == names_N)
        return losses.itc(
            gather(learner.image_KE),
            gather(learner.text_KE),
            keys.image_NE,
            keys.text_NE,
            self.temperature,
            alpha,
            keys.positive_BN,
        )


@register_system("albef")
class ALBEF(FusionModel, DualEncoder):
    """Contrastive alignment of two towers, then matching and masked words in a fusion-encoder above the text's.

    As published: the text encoder is the lower half of a BERT; the upper half, with attention to the image tokens put
    into each layer, is the fusion-encoder, and started from pretrained weights it starts from BERT's own. The towers,
    projections, fusion-encoder and word head have a moving average, which gives the keys of the queue and soft targets
    for contrast and words; it moves before the forward pass, in training mode only, so with accumulation it moves once
    a micro-batch. Its first move is a copy, so that it follows whatever weights were loaded before.

    Other than published: the contrastive loss is over all ranks and knows images of one study for positives; look-alike
    negatives are drawn by the model's own similarities, never of the same study or text; the queue starts empty
    instead of with noise; the word head starts at random; special tokens are never masked.

    Attributes:
        momentum: the moving average, a `Layers` in `momentum.module`. Nothing in it learns.
        itc_head: the learned temperature and the queue.
    """

    Config = ALBEFConfig

    def __init__(
        self,
        config: ALBEFConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        _check(image_encoder, text_encoder, config)
        width = text_encoder.token_dim
        super().__init__(
            config,
            image_encoder,
            text_encoder,
            nn.Linear(image_encoder.feature_dim, config.projection_dim),
            nn.Linear(width, config.projection_dim),
            transform=transform,
            tokenizer=tokenizer,
        )
        sizes = Sizes(
            width=width,
            layers=config.layers,
            heads=config.heads,
            intermediate=config.intermediate,
            dropout=config.dropout,
        )
        self.fusion = nn.ModuleList(CoAttentionLayer(sizes, image_encoder.patch_dim) for _ in range(config.layers))
        self.mlm_head = WordHead(width, text_encoder.vocab_size, tied=True)
        self.itm_head = nn.Linear(width, 2)
        self.itc_head = ContrastHead(config)
        self.pooled_dim = width
        for module in (self.image_head, self.text_head, self.fusion, self.itm_head):
            init_weights(module)
        self.momentum = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(config.momentum))
        self.momentum.requires_grad_(False)

    @classmethod
    def build(cls, config: ALBEFConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
        if not isinstance(image_encoder, ImageEncoder):
            raise ConfigError("albef compares images with texts: precomputed regions are none")
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        model = cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        if pretrained:
            sizes: dict[str, Any] = {**config.text_arguments}
            sizes["num_hidden_layers"] = text_encoder.num_layers + config.layers
            whole = create_text_encoder(config.text_encoder, pretrained=True, vocab_size=config.vocab_size, **sizes)
            start_from_bert(model.fusion, whole)
        return model

    @property
    def layers(self) -> Layers:
        """The parts that the moving average follows, themselves and not copies."""
        return Layers(
            self.image_encoder, self.text_encoder, self.image_head, self.text_head, self.fusion, self.mlm_head
        )

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """See the base class."""
        return self.layers.image_tokens(image, has_image_B)

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """See the base class."""
        return self.layers.text_tokens(ids_BT, mask_BT, has_text_B)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class."""
        return self.layers.fuse(text, image)

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class."""
        return self.layers.looks(text, image).cells(image, leading=1)

    def embed_image_tokens(self, image: Tokens) -> Embeddings:
        """What `embed_images` gives, of images that are encoded already; only the first token is read."""
        return Embeddings(embed(self.image_head, image))

    def embed_text_tokens(self, text: Tokens) -> Embeddings:
        """What `embed_texts` gives, of texts that are encoded already; only the first token is read."""
        return Embeddings(embed(self.text_head, text))

    def learn(self, batch: Batch) -> Losses:
        """Contrast and matching among the samples with an image and a text; words of every sample with a text."""
        masked, masked_N = draw_text(batch, self.masking)
        hidden_N = masked.labels_BT.flatten()[masked_N]
        if self.training:
            clamp_temperature_(self.itc_head.temperature)
            self.momentum.update_parameters(self.layers)
        alpha = ramped_alpha(max(int(self.momentum.n_averaged) - 1, 0), self.config.ramp_steps, self.config.alpha)
        row_K = complete_rows(batch)
        learner = self.layers.read(batch, masked.ids_BT, masked_N, row_K)
        average: Any = self.momentum.module
        with torch.no_grad():
            teacher: Read = average.read(batch, masked.ids_BT, masked_N, row_K)
        names_K = name_ids(batch.keys if batch.studies is None else batch.studies).to(row_K.device)[row_K]
        itc = self.itc_head(learner, teacher, names_K, alpha)
        pairs = self.hard_negatives(batch, learner, row_K)
        itm = losses.itm(
            self.match(learner.text.rows(pairs.text_N), learner.image.rows(pairs.image_N)), pairs.matched_N
        )
        mlm = losses.mlm_distilled(learner.words_NV, hidden_N, teacher.words_NV, alpha)
        total = self.config.itc_weight * itc + self.config.itm_weight * itm + self.config.mlm_weight * mlm
        return Losses(total=total, terms={"itc": itc, "itm": itm, "mlm": mlm})

    def hard_negatives(self, batch: Batch, read: Read, row_K: Tensor) -> MatchingPairs:
        """Rows of the batch: K pairs, and for each text an image, for each image a text, that look like theirs."""
        similarity_KK = (read.image_KE @ read.text_KE.T).detach() / self.itc_head.temperature.detach()
        same_KK = same_rows(batch)[row_K][:, row_K]
        return of_rows(hard_pairs(similarity_KK, same_KK, torch.default_generator), row_K)


def start_from_bert(fusion: nn.ModuleList, whole: TextEncoder) -> None:
    """Give the layers of a fusion-encoder the weights of a BERT's last layers, as many; attention to the image stays.

    Raises ConfigError when the encoder is no BERT of the same sizes.
    """
    backbone: Any = whole.backbone
    blocks = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(blocks, nn.ModuleList) or any(
        name not in dict(blocks[0].named_modules()) for name in _BERT.values()
    ):
        raise ConfigError(f"albef's fusion-encoder is the upper half of a BERT: {whole.name} is not one")
    for layer, block in zip(fusion, blocks[-len(fusion) :], strict=True):
        for mine, theirs in _BERT.items():
            try:
                layer.get_submodule(mine).load_state_dict(block.get_submodule(theirs).state_dict())
            except RuntimeError as error:
                raise ConfigError(f"the layers of {whole.name} are of other sizes: {error}") from error


def _check(image_encoder: ImageEncoder, text_encoder: TextEncoder, config: ALBEFConfig) -> None:
    if image_encoder.feature_dim != image_encoder.patch_dim:
        raise ConfigError(
            f"albef's text looks at an image's pooled vector beside its patches: {config.image_encoder} has "
            f"{image_encoder.feature_dim} and {image_encoder.patch_dim} numbers in them, take a vision Transformer"
        )
    table = getattr(text_encoder.backbone, "get_input_embeddings", None)
    if text_encoder.pool != "cls" or table is None or table().weight.shape[1] != text_encoder.token_dim:
        raise ConfigError(
            f"albef's text encoder is a BERT or its like, with a class token and words as wide as its states: "
            f"{config.text_encoder} is not"
        )
    if text_encoder.token_dim % config.heads:
        raise ConfigError(
            f"{config.text_encoder} is {text_encoder.token_dim} wide: no multiple of heads {config.heads}"
        )
