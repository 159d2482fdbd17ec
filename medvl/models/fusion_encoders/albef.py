"""ALBEF: align before fuse (Li et al., arXiv 2107.07651, NeurIPS 2021). Both a dual-encoder and
a fusion-encoder; M2I2 and MUMC extend it.

N masked positions, K samples with an image and a text, G those of all ranks; the other letters
as in `medvl.schema`.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from medvl import losses
from medvl.common.compilation import untraced
from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, create_text_encoder
from medvl.encoders.pretrained import Pretrained
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, gather
from medvl.losses.masked import mask_patches
from medvl.losses.pairs.blockwise import name_ids
from medvl.losses.pairs.image_text import (
    Keys,
    MatchingPairs,
    MomentumQueue,
    clamp_temperature_,
    hard_pairs,
    ramped_alpha,
)
from medvl.models.base import (
    EncoderArguments,
    MaskedWords,
    Parts,
    WordHead,
    complete_rows,
    init_weights,
)
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import (
    DecoderLayers,
    FusionConfig,
    FusionModel,
    create_pixel_encoders,
)
from medvl.models.fusion_encoders.bases.bert_stream import init_from_bert
from medvl.models.fusion_encoders.bases.objectives import (
    ContrastiveEncoded,
    Corruption,
    DistilledLanguageModeling,
    HardNegativeMatching,
    ImageTextContrast,
)
from medvl.models.fusion_encoders.parts.encoder import AttentionMaps, Fused, Tokens
from medvl.models.fusion_encoders.parts.inputs import (
    encode_present,
    encode_visible,
    pairs_of_rows,
    same_rows,
)
from medvl.models.fusion_encoders.parts.transformer import CoAttentionLayer, Sizes, keep_first
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ALBEFConfig(FusionConfig):
    """Published settings of ALBEF."""

    layers: int = 6
    """Layers of the fusion-encoder, which is as wide as the text encoder."""
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Dropout of the fusion-encoder's hidden states and attention."""
    projection_dim: int = 256
    """E of the shared space."""
    temperature: float = 0.07
    """Initial value of the learned temperature."""
    queue_size: int = 65_536
    """Past pairs that serve as negatives; 0 uses the batch only."""
    momentum: float = 0.995
    """Decay of the teacher's moving average, updated before every optimiser step."""
    alpha: float = 0.4
    """Weight of the teacher's targets, in the contrastive loss and for masked words."""
    ramp_steps: int = 10_000
    """Optimiser steps in which alpha grows from 0: the paper's first epoch, 5.1 million pairs in
    batches of 512.
    """
    mask_ratio: float = 0.0
    """Share of the patches that training removes from each image (`encode_visible`), drawn at
    random and separately for the model and its teacher.
    """
    negative_floor: float = 0.0
    """Constant added to the probabilities from which hard negatives are sampled."""
    image_encoder: str = "vit_b16"
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"num_hidden_layers": 6}
    )
    """The lower half of BERT encodes the text; the upper half is the fusion-encoder of `layers`
    layers.
    """
    image_size: int = 256
    fit: Literal["crop", "pad", "squash"] = "squash"
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    max_tokens: int = 25
    former = (("itc_weight", 1.0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(
            self,
            "(0, inf)",
            "layers",
            "heads",
            "intermediate",
            "projection_dim",
            "temperature",
        )
        check_within(self, "[0, 1)", "dropout", "momentum", "alpha", "mask_ratio")
        check_within(self, "[0, inf)", "queue_size", "ramp_steps", "negative_floor")


class _Pass(NamedTuple):
    """A batch encoded by the model or by its teacher; texts are encoded unmasked and masked."""

    image: Tokens
    text: Tokens
    word_states_ND: Tensor
    image_KE: Tensor
    text_KE: Tensor


class Towers(nn.Module):
    """The parts that exist twice: in the model and in its moving average."""

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
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder
        self.image_head = image_head
        self.text_head = text_head
        self.fusion = fusion
        self.mlm_head = mlm_head

    def image_tokens(
        self, image: Tensor, has_image_B: Tensor | None, keep_BK: Tensor | None
    ) -> Tokens:
        """Return the pooled vector (the class token), then the patches, of `keep_BK` where only
        those are encoded.
        """
        return encode_present(
            has_image_B, self.image_encoder.feature_dim, self._encode_images, image, keep_BK
        )

    def _encode_images(self, image: Tensor, keep_BK: Tensor | None) -> Tokens:
        encoder = self.image_encoder
        features = encoder(image) if keep_BK is None else encode_visible(encoder, image, keep_BK)
        pooled_B1D = features.pooled_BD[:, None]
        if features.patches_BPD is None:
            return Tokens(pooled_B1D, None)
        return Tokens(torch.cat([pooled_B1D, features.patches_BPD], dim=1), None)

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None) -> Tokens:
        """Return the class token, then the others; of a sample without a text, the class token
        remains.
        """
        features = self.text_encoder(ids_BT, keep_first(mask_BT, has_text_B))
        return Tokens(features.tokens_BTD, features.mask_BT)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """Let the text attend to the image, which stays unchanged; a pair's vector is the class
        token's state.
        """
        states_BTD = self._run_layers(text, image, len(self.fusion))
        return Fused(Tokens(states_BTD, text.mask_BN), image, states_BTD[:, 0])

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Return attention to all image tokens; the pooled token is the first of the text."""
        states_BTD = self._run_layers(text, image, len(self.fusion) - 1)
        last: Any = self.fusion[-1]
        weights_BTP = last.cross_weights(states_BTD, image.states_BND, text.mask_BN, image.mask_BN)
        return AttentionMaps(weights_BTP[:, 0], weights_BTP)

    def _run_layers(self, text: Tokens, image: Tokens, depth: int) -> Tensor:
        """Return the text's states after the first `depth` layers."""
        packing = self.text_encoder.packing_of(text.mask_BN)
        states_BTD = text.states_BND if packing is None else packing.pack(text.states_BND)
        for layer in self.fusion[:depth]:
            states_BTD = layer(states_BTD, image.states_BND, text.mask_BN, image.mask_BN, packing)
        return states_BTD if packing is None else packing.unpack(states_BTD)

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the vocabulary."""
        backbone: Any = self.text_encoder.backbone
        scores_NV: Tensor = self.mlm_head(states_ND, backbone.get_input_embeddings().weight)
        return scores_NV

    def run(self, batch: Batch, words: MaskedWords, row_K: Tensor, keep_BK: Tensor | None) -> _Pass:
        """Encode each image once, and each text unmasked and masked in one pass."""
        image = self.image_tokens(batch.image_BCHW, batch.has_image_B, keep_BK)
        twice_2B = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        both = self.text_tokens(
            torch.cat([batch.ids_BT, words.ids_BT]), batch.mask_BT.repeat(2, 1), twice_2B
        )
        row_B = torch.arange(len(batch), device=words.ids_BT.device)
        text = both.rows(row_B)
        masked = both.rows(row_B + len(batch))
        return _Pass(
            image=image,
            text=text,
            word_states_ND=self.fuse(masked, image).text.states_BND.flatten(0, 1)[words.position_N],
            image_KE=embed(self.image_head, image.rows(row_K)),
            text_KE=embed(self.text_head, text.rows(row_K)),
        )


def embed(head: nn.Module, tokens: Tokens) -> Tensor:
    """(B, E): project the first token to the shared space, L2-normalised float32."""
    return F.normalize(head(tokens.states_BND[:, 0]).float(), dim=-1)


class ContrastHead(nn.Module):
    """The contrastive loss with a learned temperature and a queue of past pairs."""

    def __init__(self, config: ALBEFConfig) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(config.temperature))
        self.queue = MomentumQueue(config.queue_size, config.projection_dim)

    @untraced  # names are hashed on the host, and the queue grows
    def keys(self, batch: Batch, row_K: Tensor, teacher: _Pass) -> Keys:
        """Gather the teacher's embeddings of all ranks; in training mode, compare with the
        queue, and add to it.
        """
        names_B = name_ids(batch.keys if batch.studies is None else batch.studies).to(row_K.device)
        image_NE = gather(teacher.image_KE)
        text_NE = gather(teacher.text_KE)
        names_N = gather(names_B[row_K])
        if not self.training:
            return Keys(image_NE, text_NE, names_N[:, None] == names_N)
        keys = self.queue.keys(image_NE, text_NE, names_N)
        self.queue.enqueue(image_NE, text_NE, names_N)
        return keys

    def forward(self, encoded: ContrastiveEncoded) -> Tensor:
        """Contrast the images of all ranks with the keys' texts, and the texts with the keys'
        images.
        """
        keys = encoded.keys
        pairs = (encoded.image_GE, encoded.text_GE)
        return losses.itc(
            *pairs, keys.image_NE, keys.text_NE, self.temperature, encoded.alpha, keys.positive_BN
        )

    def unimodal(self, encoded: ContrastiveEncoded) -> Tensor:
        """Contrast the images of all ranks with the keys' images, and the texts with the keys'
        texts.
        """
        keys = encoded.keys
        pairs = (encoded.image_GE, encoded.text_GE)
        return losses.unimodal_itc(
            *pairs, keys.image_NE, keys.text_NE, self.temperature, keys.positive_BN
        )


@register_system("albef")
class ALBEF(FusionModel, DualEncoder):
    """Contrastive alignment of two towers, then matching and masked words in a fusion-encoder above
    the text's.

    As published, the text encoder is the lower half of a BERT; the upper half, with cross-attention
    to the image tokens added to each layer, is the fusion-encoder. With `pretrained` it starts from
    BERT's upper half.

    Deviations: the image encoder starts from timm's ViT instead of DeiT, with pixels normalised as
    its weights expect instead of by CLIP's statistics; the contrastive loss is computed over all
    ranks, with images of one study as positives; hard negatives are sampled by the model's own
    similarities, never from the same study or text; the queue starts empty instead of with noise;
    the word head starts at random; special tokens are never masked.

    Towers, projections, fusion-encoder and word head have a moving average (the teacher), which
    gives the keys of the queue and soft targets for contrast and words. It moves in `before_step`,
    once for an optimiser step however many micro-batches that has. Its first move is a copy, so
    that it follows loaded weights.

    Attributes:
        momentum: the moving average, a `Towers` in `momentum.module`, without trainable parameters.
        itc_head: the learned temperature and the queue.
    """

    Config = ALBEFConfig
    compares_pairs = False

    def __init__(
        self,
        config: ALBEFConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        _check_encoders(image_encoder, text_encoder, config)
        width = text_encoder.token_dim
        super().__init__(
            config,
            image_encoder,
            text_encoder,
            nn.Linear(image_encoder.feature_dim, config.projection_dim),
            nn.Linear(width, config.projection_dim),
            **parts,
        )
        sizes = Sizes.of(config, width)
        self.fusion = nn.ModuleList(
            CoAttentionLayer(sizes, image_encoder.patch_dim) for _ in range(config.layers)
        )
        self.mlm_head = WordHead(width, text_encoder.vocab_size, tied=True)
        self.itm_head = nn.Linear(width, 2)
        self.itc_head = ContrastHead(config)
        self.pooled_dim = self.fused_dim = width
        for module in (self.image_head, self.text_head, self.fusion, self.itm_head):
            init_weights(module)
        self.momentum = AveragedModel(
            self.towers, multi_avg_fn=get_ema_multi_avg_fn(config.momentum)
        )
        self.momentum.requires_grad_(False)
        self._follows = False
        self.itc = ImageTextContrast(1.0, self.itc_head)
        self.itm = HardNegativeMatching(config.itm_weight, self.sample_hard_pairs, self.match)
        self.mlm = DistilledLanguageModeling(config.mlm_weight, self.mask_words, self.score_words)
        self.objectives = (self.itc, self.itm, self.mlm)

    @classmethod
    def build(cls, config: ALBEFConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        image_encoder, text_encoder = create_pixel_encoders(config, cls.name, pretrained=pretrained)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        model = cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        model._init_fusion(pretrained)
        return model

    def load_encoders(self, image: Pretrained, text: Pretrained) -> None:
        """Start the fusion-encoder from the upper half of the text's BERT."""
        super().load_encoders(image, text)
        self._init_fusion(text)

    def _init_fusion(self, source: Pretrained) -> None:
        if source is not False:
            config = self.config
            arguments: dict[str, Any] = {**config.text_arguments}
            arguments["num_hidden_layers"] = self.text_encoder.num_layers + config.layers
            bert = create_text_encoder(
                config.text_encoder, pretrained=source, vocab_size=config.vocab_size, **arguments
            )
            init_from_bert(self.fusion, bert)

    @property
    def towers(self) -> Towers:
        """The parts that the teacher follows; shared with the model, not copied."""
        return Towers(
            self.image_encoder,
            self.text_encoder,
            self.image_head,
            self.text_head,
            self.fusion,
            self.mlm_head,
        )

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        return self.towers.image_tokens(image, has_image_B, None)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        return self.towers.text_tokens(ids_BT, mask_BT, has_text_B)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        return self.towers.fuse(text, image)

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        return self.towers.cross_attention(text, image).cells(image, leading=1)

    def score_words(self, states_ND: Tensor) -> Tensor:
        return self.towers.score_words(states_ND)

    def answer_memory(self, fused: Fused) -> Tokens:
        """Return the text's states only: the fusion-encoder leaves the image unchanged."""
        return fused.text

    def embed_image_tokens(self, image: Tokens) -> Embeddings:
        """Embed images that are encoded already, like `embed_images`; only the first token is
        read.
        """
        return Embeddings(embed(self.image_head, image))

    def embed_text_tokens(self, text: Tokens) -> Embeddings:
        """Embed texts that are encoded already, like `embed_texts`; only the first token is
        read.
        """
        return Embeddings(embed(self.text_head, text))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Move the teacher towards the model, and limit the temperature."""
        clamp_temperature_(self.itc_head.temperature)
        self.momentum.update_parameters(self.towers)
        self._follows = True

    def kept_patches(self, batch: Batch, corruption: Corruption) -> Tensor | None:
        """(B, K): the patches that the model encodes in this step; None: all."""
        return self._random_patches(batch)

    def _random_patches(self, batch: Batch) -> Tensor | None:
        if not (self.training and self.config.mask_ratio):
            return None
        patches = math.prod(self.image_encoder.grid(*batch.image_BCHW.shape[2:]))
        generator = torch.default_generator
        device = batch.image_BCHW.device
        return mask_patches(len(batch), patches, self.config.mask_ratio, generator, device).kept_BK

    def encode(self, batch: Batch, corruption: Corruption) -> ContrastiveEncoded:
        """Encode the batch by the model and by its teacher.

        Raises ConfigError in training mode if `before_step` was never called: the teacher would
        keep its first weights.
        """
        if self.training and not self._follows:
            message = (
                "expected before_step(step) before the forward pass of each optimiser "
                "step; call it in your loop"
            )
            raise ConfigError(message, "missing", field="before_step")
        steps = self.momentum.n_averaged - 1  # a tensor, of which no graph is compiled anew
        words = corruption.of(self.mlm)
        row_K = complete_rows(batch)
        model = self.towers.run(batch, words, row_K, self.kept_patches(batch, corruption))
        average: Any = self.momentum.module
        with torch.no_grad():
            teacher: _Pass = average.run(batch, words, row_K, self._random_patches(batch))
            teacher_words_NV = average.score_words(teacher.word_states_ND)
        return ContrastiveEncoded(
            batch=batch,
            image=model.image,
            text=model.text,
            word_states_ND=model.word_states_ND,
            pooled_MD=model.text.states_BND[:, 0],
            row_K=row_K,
            image_KE=model.image_KE,
            text_KE=model.text_KE,
            image_GE=gather(model.image_KE),
            text_GE=gather(model.text_KE),
            keys=self.itc_head.keys(batch, row_K, teacher),
            teacher_words_NV=teacher_words_NV,
            alpha=ramped_alpha(steps.clamp(min=0), self.config.ramp_steps, self.config.alpha),
        )

    @untraced  # the number of pairs depends on values
    def sample_hard_pairs(
        self, batch: Batch, image_KE: Tensor, text_KE: Tensor, row_K: Tensor
    ) -> MatchingPairs:
        """Return the K matching pairs, and for each text a similar image, for each image a similar
        text.

        Args:
            batch: decides which rows are never each other's negatives.
            image_KE, text_KE: embeddings of the rows.
            row_K: complete rows of the batch.
        """
        with full_precision(image_KE), torch.no_grad():
            similarity_KK = image_KE @ text_KE.T / self.itc_head.temperature
        same_KK = same_rows(batch)[row_K][:, row_K]
        pairs = hard_pairs(
            similarity_KK, same_KK, torch.default_generator, self.config.negative_floor
        )
        return pairs_of_rows(pairs, row_K)

    def init_decoder(self, decoder: DecoderLayers) -> None:
        """Copy the last fusion layers and the word head (ALBEF, section 5).

        Cross-attention is copied if images are as wide as words. Raises ConfigError if the decoder
        has more layers than the fusion-encoder, or layers of other sizes.
        """
        sizes = decoder.sizes
        config = self.config
        if sizes.layers > config.layers or (sizes.heads, sizes.intermediate) != (
            config.heads,
            config.intermediate,
        ):
            message = (
                f"decoder must have the fusion-encoder's layers, heads and intermediate; "
                f"got {sizes}"
            )
            raise ConfigError(message, "conflict", field="decoder")
        layers: Any = decoder.layers
        fusion: Any = self.fusion
        for layer, fused in zip(layers, fusion[-sizes.layers :], strict=True):
            layer.attention.load_state_dict(fused.attention.state_dict())
            layer.feed_forward.load_state_dict(fused.feed_forward.state_dict())
            if self.image_encoder.patch_dim == sizes.width:
                layer.cross_attention.load_state_dict(fused.cross_attention.state_dict())
        decoder.word_head.load_state_dict(self.mlm_head.state_dict())


def _check_encoders(
    image_encoder: ImageEncoder, text_encoder: TextEncoder, config: ALBEFConfig
) -> None:
    if image_encoder.feature_dim != image_encoder.patch_dim:
        message = (
            f"pooled and patch features of {config.image_encoder} must be equally wide, "
            f"as in vision Transformers"
        )
        raise ConfigError(message, "unsupported", field="image_encoder")
    embeddings = getattr(text_encoder.backbone, "get_input_embeddings", None)
    if (
        text_encoder.pool != "cls"
        or embeddings is None
        or embeddings().weight.shape[1] != text_encoder.token_dim
    ):
        message = (
            f"text_encoder must be BERT-like, with words as wide as its states; got "
            f"{config.text_encoder}"
        )
        raise ConfigError(message, "unsupported", field="text_encoder")
    if text_encoder.token_dim % config.heads:
        message = (
            f"heads must divide the text encoder's width {text_encoder.token_dim}, got "
            f"{config.heads}"
        )
        raise ConfigError(message, "conflict", field="heads")
