"""The base of systems that pretrain a text encoder by masked words and a task on pairs of segments.

B batch, T text tokens, N masked positions, V vocabulary, D width.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import (
    MaskedText,
    MaskingDraw,
    PairTask,
    TextBatch,
    TextMasking,
    TextSequences,
)
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.encoders.presets import TEXT_PRESETS
from medvl.encoders.pretrained import Pretrained, read_source
from medvl.errors import ConfigError, WeightsError
from medvl.losses.common import mean_of
from medvl.losses.masked import IGNORED, masked_positions
from medvl.models.base import (
    EncoderArguments,
    Parts,
    System,
    SystemConfig,
    WordHead,
    init_weights,
    text_masking,
)
from medvl.schema import Batch, Losses

# An old text encoder under a new vocabulary.

_TABLE = "word_embeddings.weight"


def load_under_new_vocabulary(encoder: TextEncoder, name: str, source: Pretrained) -> None:
    """Load weights of an encoder with another vocabulary; the table of words of `encoder` stays as
    it is.

    Raises WeightsError where the weights are not available, have no table of words, or do not fit.
    """
    preset = TEXT_PRESETS.get(name)
    published, note = (preset.weights, preset.note) if preset else (None, "")
    file, tensors = read_source(name, source, published, note)
    tables = [tensor for key, tensor in tensors.items() if key.endswith(_TABLE)]
    if not tables:
        raise WeightsError(f"{file} has no table of words ({_TABLE})", "mismatch")
    arguments: dict[str, Any] = {**encoder.config, "name": name, "vocab_size": tables[0].shape[0]}
    old = create_text_encoder(**arguments, pretrained=source).state_dict()
    own = encoder.state_dict()
    encoder.load_state_dict({key: own[key] if key.endswith(_TABLE) else old[key] for key in own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModelConfig(SystemConfig):
    """Settings of every system of a text encoder alone."""

    text_encoder: str
    text_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    """Arguments of the text encoder by its library's names, such as `{"num_hidden_layers": 3}`."""
    text_weights: str | None = None
    """Initial weights of the text encoder: a file, a folder with one, or `OWNER/NAME@COMMIT[:FILE]`
    on the hub; None takes those that `pretrained` selects. `create_model` reads them; a checkpoint
    has weights of its own.
    """
    max_tokens: int = 512
    vocab_size: int | None = None
    """Embeddings of the text encoder; None takes the tokenizer's size where one is given, else
    the preset's.
    """

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "max_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(TextModelConfig):
    """Settings of every system that pretrains a text encoder by masked words."""

    new_vocabulary: bool = False
    """Start from weights of another vocabulary: their table of words is left out and drawn anew,
    all else is kept.
    """
    mlm_probability: float = 0.15
    """Share of words that are masked; with `rate_ramp`, in evaluation only."""
    rate_ramp: tuple[float, ...] = ()
    """Shares in equal parts of `ramp_steps`, such as 0.05, 0.1, 0.15, 0.2, 0.25; empty keeps
    `mlm_probability`.
    """
    ramp_steps: int | None = None
    """Steps over which `rate_ramp` runs, those of the training; the last share stays afterwards."""
    whole_words: bool = True
    """Mask all pieces of a word or none."""
    longest_span: int = 1
    """Above 1, mask spans of up to this many words (`TextMasking`)."""
    pairs: PairTask = "none"
    """Task on pairs of segments; its loss is added to that of masked words, as in BERT."""
    former = (("pair_weight", 1.0),)
    short_probability: float = 0.0
    """Share of sequences that are cut to a random length; 0.1 in BERT's released code."""
    attention_dropout: float | None = None
    """Dropout of attention in training; None is the encoder's default. At 0, packed text uses
    the GPU's kernel.
    """
    adversarial_weight: float = 0.0
    """Weight of the symmetric KL between the predictions with and without noise on the word
    embeddings; the noise is increased by one step along its gradient (ALUM, Liu et al., arXiv
    2004.08994: 10). Costs two more passes; 0 is without.
    """
    adversarial_std: float = 1e-5
    """Standard deviation of the first noise."""
    adversarial_step: float = 1e-3
    """Largest change of a token's noise by the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1)", "mlm_probability")
        check_within(
            self,
            "[0, inf)",
            "adversarial_weight",
            "adversarial_std",
            "adversarial_step",
        )
        check_within(self, "[0, 1)", "attention_dropout", "short_probability")
        check_within(self, "[1, inf)", "longest_span", "ramp_steps")
        check_choice(self.pairs, ("none", "next", "order"), "pairs")
        if not all(0 < rate < 1 for rate in self.rate_ramp):
            raise ConfigError(
                f"rates must be within (0, 1), got {self.rate_ramp}",
                "out_of_range",
                field="rate_ramp",
            )
        if bool(self.rate_ramp) != (self.ramp_steps is not None):
            raise ConfigError(
                "give rate_ramp and ramp_steps, or neither", "conflict", field="ramp_steps"
            )


class LanguageModel(System):
    """A text encoder with heads for masked words and, unless `config.pairs` is none, for pairs of
    segments.

    A system sets how the word head is built. Losses are divided by `Batch.mean_counts_K`, so that
    an update's gradient equals that of the mean over all masked positions of its batches.

    Attributes:
        text_encoder: shared with other systems (`medvl.models.load_towers`).
        word_head: tied to the encoder's table of words.
        pooler, pair_head: linear layer before a tanh on the first token, and 2 logits; None without
            pairs.
        rate: share of words that the current step masks.
    """

    shared_encoders = ("text_encoder",)
    optional_parts = ("pooler", "pair_head")
    pair_dropout: ClassVar[float] = 0.0
    """Dropout between pooler and pair head."""

    def __init__(
        self, config: Any, text_encoder: TextEncoder, word_head: WordHead, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, **parts)
        self.text_encoder = text_encoder
        self.word_head = word_head
        self.pooler: nn.Linear | None = None
        self.pair_head: nn.Linear | None = None
        if config.pairs != "none":
            self.pooler = nn.Linear(text_encoder.token_dim, text_encoder.token_dim)
            self.pair_head = nn.Linear(text_encoder.token_dim, 2)
            init_weights(self.pooler)
            init_weights(self.pair_head)
        self.rate: float = config.mlm_probability

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        arguments: dict[str, Any] = {**config.text_arguments, "vocab_size": config.vocab_size}
        if config.attention_dropout is not None:
            arguments["attention_probs_dropout_prob"] = config.attention_dropout
        replaces_words = pretrained and config.new_vocabulary
        encoder = create_text_encoder(
            config.text_encoder, pretrained=pretrained and not replaces_words, **arguments
        )
        if not hasattr(encoder.backbone, "get_input_embeddings") or not hasattr(
            encoder.backbone, "embeddings"
        ):
            message = f"{encoder.name} has no table of words to predict: use a BERT or an ALBERT"
            raise ConfigError(message, "unsupported", field="text_encoder")
        if replaces_words:
            load_under_new_vocabulary(encoder, config.text_encoder, True)
        head = cls.make_word_head(encoder)
        return cls(config, encoder, head, transform=EvalTransform(size=32), tokenizer=tokenizer)

    @classmethod
    def make_word_head(cls, text_encoder: TextEncoder) -> WordHead:
        """Return the head over the vocabulary: BERT's, as wide as the word embeddings."""
        backbone: Any = text_encoder.backbone
        return WordHead(
            text_encoder.token_dim,
            text_encoder.vocab_size,
            tied=True,
            table_width=backbone.get_input_embeddings().embedding_dim,
            approximate="tanh" if backbone.config.hidden_act == "gelu_new" else "none",
            eps=backbone.config.layer_norm_eps,
        )

    def _load_encoder(self, part: str, source: Any) -> None:
        """Load weights as the base class does; of another vocabulary without their table of
        words.
        """
        if part == "text_encoder" and self.config.new_vocabulary:
            load_under_new_vocabulary(self.text_encoder, self.config.text_encoder, source)
            return
        super()._load_encoder(part, source)

    @functools.cached_property
    def sequences(self) -> TextSequences:
        """Maker of the training sequences, for `open_text_loader`.

        Raises ConfigError without a tokenizer, without a mask token in it, or where it has no
        pairs.
        """
        config = self.config
        masking: TextMasking = text_masking(
            self,
            rate=config.mlm_probability,
            whole_words=config.whole_words,
            longest_span=config.longest_span,
        )
        return TextSequences(
            self.require_tokenizer("training"),
            masking,
            pairs=config.pairs,
            max_tokens=config.max_tokens,
            short_probability=config.short_probability,
        )

    def before_step(self, step: int) -> None:
        """Set the rate of masking."""
        if self.config.rate_ramp:
            part = step * len(self.config.rate_ramp) // self.config.ramp_steps
            self.rate = self.config.rate_ramp[min(part, len(self.config.rate_ramp) - 1)]

    def mask(self, batch: TextBatch) -> MaskedText:
        """Return the masked texts of a batch; in eval mode at `config.mlm_probability`."""
        rate = self.rate if self.training else self.config.mlm_probability
        return MaskingDraw(batch.order_BT, batch.masked_BT).at(rate, batch.ids_BT)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (2,) float32: how many masked tokens and pairs of segments the losses of a
        batch are sums over.
        """
        batch = check_text_batch(batch)
        masked = self.mask(batch).labels_BT != IGNORED
        pairs = batch.pair_B != IGNORED
        return torch.stack([masked.sum(), pairs.sum()]).float()

    def forward(self, batch: Batch) -> Losses:
        """Return the losses "mlm", "pairs" (unless `config.pairs` is none) and "adversarial" (if it
        has a weight).

        Raises ConfigError for a batch that `open_text_loader` did not make.
        """
        batch = check_text_batch(batch)
        masked = self.mask(batch)
        position_N = masked_positions(masked.labels_BT)
        target_N = masked.labels_BT.flatten()[position_N]
        words, pairs = (None, None) if batch.mean_counts_K is None else batch.mean_counts_K
        states_BTD = self.text_encoder(
            masked.ids_BT, batch.mask_BT, types_BT=batch.types_BT
        ).tokens_BTD
        logits_NV = self.score_words(states_BTD.flatten(0, 1)[position_N])
        terms = {"mlm": (losses.mlm(logits_NV, target_N, words), 1.0)}
        if self.pair_head is not None:
            pair_loss = _pair_loss(self.score_pairs(states_BTD[:, 0]), batch.pair_B, pairs)
            terms["pairs"] = pair_loss, 1.0
        if self.config.adversarial_weight:
            noisy_NV = self._score_with_noise(masked.ids_BT, batch, position_N, logits_NV.detach())
            terms["adversarial"] = (
                losses.symmetric_kl(logits_NV, noisy_NV, words),
                self.config.adversarial_weight,
            )
        return Losses.weighted(**terms)

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the vocabulary."""
        backbone: Any = self.text_encoder.backbone
        scores_NV: Tensor = self.word_head(states_ND, backbone.get_input_embeddings().weight)
        return scores_NV

    def score_pairs(self, first_BD: Tensor) -> Tensor:
        """(B, 2): logits of "B follows A" and of the opposite, from the state of the first token.

        Raises ConfigError in a model without pairs.
        """
        if self.pooler is None or self.pair_head is None:
            raise ConfigError(
                f"this {self.name} was built with pairs 'none'", "unsupported", field="pairs"
            )
        pooled_BD = F.dropout(torch.tanh(self.pooler(first_BD)), self.pair_dropout, self.training)
        logits_B2: Tensor = self.pair_head(pooled_BD)
        return logits_B2

    def _score_with_noise(
        self, ids_BT: Tensor, batch: TextBatch, position_N: Tensor, clean_NV: Tensor
    ) -> Tensor:
        """(N, V): scores with noise on the word embeddings, after a step away from the scores
        `clean_NV`.
        """
        backbone: Any = self.text_encoder.backbone
        table = backbone.get_input_embeddings()

        def score(noise_BTD: Tensor) -> Tensor:
            hidden_BTD = self.text_encoder.embed_vectors(
                table(ids_BT) + noise_BTD, token_type_ids=batch.types_BT
            )
            states_BTD = self.text_encoder.features(hidden_BTD, batch.mask_BT).tokens_BTD
            return self.score_words(states_BTD.flatten(0, 1)[position_N])

        noise_BTD = (
            torch.randn(*ids_BT.shape, table.embedding_dim, device=ids_BT.device)
            * self.config.adversarial_std
        )
        if torch.is_grad_enabled():
            noise_BTD.requires_grad_()
            (gradient_BTD,) = torch.autograd.grad(
                losses.symmetric_kl(clean_NV, score(noise_BTD)), noise_BTD
            )
            largest_BT1 = (
                gradient_BTD.abs()
                .amax(dim=-1, keepdim=True)
                .clamp(min=torch.finfo(torch.float32).tiny)
            )
            noise_BTD = (
                noise_BTD + self.config.adversarial_step * gradient_BTD / largest_BT1
            ).detach()
        return score(noise_BTD)


def _pair_loss(logits_B2: Tensor, pair_B: Tensor, count: Tensor | None) -> Tensor:
    total = F.cross_entropy(logits_B2.float(), pair_B, ignore_index=IGNORED, reduction="sum")
    return mean_of(total, (pair_B != IGNORED).sum() if count is None else count)


def check_text_batch(batch: Batch) -> TextBatch:
    """Return the batch. Raises ConfigError unless `open_text_loader` made it."""
    if not isinstance(batch, TextBatch):
        message = (
            f"expected a batch of open_text_loader(source, model.sequences, ...), got a "
            f"{type(batch).__name__}"
        )
        raise ConfigError(message, "wrong_type", field="batch")
    return batch


# Masked words on held-out text: accuracy, with the most frequent token as a baseline.


class MaskedWordScore:
    """Evaluator of a language model for training runs.

    Args:
        batches: validation batches, of an `open_text_loader` with `train=False`: masks are the same
            in every pass.

    Calling it with a model returns

        masked/accuracy  share of the masked tokens that get the highest score masked/unigram
        share of the most frequent one among them: accuracy of a constant prediction
        masked/perplexity  exponential of the mean cross-entropy pairs/accuracy   of the task on
        pairs, if the model has one
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        counts_V = torch.zeros(model.text_encoder.vocab_size, dtype=torch.int64)
        totals_5 = torch.zeros(5, dtype=torch.float64)  # right, masked, entropy, pairs right, pairs
        for held_out in self.batches:
            batch = check_text_batch(held_out.to(model.device))
            masked = model.mask(batch)
            position_N = masked_positions(masked.labels_BT)
            target_N = masked.labels_BT.flatten()[position_N]
            states_BTD = model.text_encoder(
                masked.ids_BT, batch.mask_BT, types_BT=batch.types_BT
            ).tokens_BTD
            logits_NV = model.score_words(states_BTD.flatten(0, 1)[position_N]).float()
            right = (logits_NV.argmax(dim=1) == target_N).sum()
            entropy = torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="sum")
            row = [right, torch.tensor(len(target_N)), entropy, torch.tensor(0), torch.tensor(0)]
            if model.pair_head is not None:
                has_B = batch.pair_B >= 0
                answer_B = model.score_pairs(states_BTD[:, 0]).argmax(dim=1)
                row[3:] = [(answer_B == batch.pair_B)[has_B].sum(), has_B.sum()]
            totals_5 += torch.stack([value.double().cpu() for value in row])
            counts_V += torch.bincount(target_N, minlength=len(counts_V)).cpu()
        right, masked_count, entropy, pairs_right, pairs = totals_5.tolist()
        scores = {
            "masked/accuracy": right / max(masked_count, 1),
            "masked/unigram": int(counts_V.max()) / max(masked_count, 1),
            "masked/perplexity": float(torch.tensor(entropy / max(masked_count, 1)).exp()),
        }
        return scores | (
            {"pairs/accuracy": pairs_right / max(pairs, 1)} if model.pair_head is not None else {}
        )


# Fine-tuning head of a text encoder: one linear layer (Gu et al. 2021, Section 3.3).
#
# Letters: C classes (1 for a score), S mentions (2).

TextPool = Literal["first", "mentions", "starts", "tokens"]


class TextHead(nn.Module):
    """A text encoder with dropout and a linear layer on its last layer's states.

    There is no pooler: "first" is the state of the first token, which the paper calls the [CLS]
    encoding. The sequence heads of transformers read a dense layer with tanh behind it instead.

    Args:
        encoder: trained with the head.
        outputs: number of classes, 1 for a score.
        pool: "first", the first token; "mentions", the mean over each of two mentions, side by
            side; "starts", the first token of each; "tokens", every token.
        dropout: probability, before the linear layer.
    """

    def __init__(
        self, encoder: TextEncoder, outputs: int, pool: TextPool = "first", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pool = pool
        mentions = 2 if pool in ("mentions", "starts") else 1
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(mentions * encoder.token_dim, outputs)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        types_BT: Tensor | None = None,
        mention_BST: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, C), or (B, T, C) with pool "tokens".

        Args:
            ids_BT, mask_BT: token ids, and True on real tokens.
            types_BT: 1 on the second text of a pair; None where all are 0.
            mention_BST: True on the tokens of the first and of the second mention, for "mentions"
                and "starts".

        Raises ConfigError without mentions where they are needed, and for types with an encoder
        that has none.
        """
        positions = {} if types_BT is None else {"token_type_ids": types_BT}
        hidden_BTD = self.encoder.embed(ids_BT, mask_BT, **positions)
        tokens_BTD = self.encoder.encode(hidden_BTD, mask_BT)[-1]
        logits: Tensor = self.linear(self.dropout(self._pooled(tokens_BTD, mention_BST)))
        return logits

    def _pooled(self, tokens_BTD: Tensor, mention_BST: Tensor | None) -> Tensor:
        if self.pool == "tokens":
            return tokens_BTD
        if self.pool == "first":
            return tokens_BTD[:, 0]
        if mention_BST is None:
            raise ConfigError(
                f"pool {self.pool!r} needs the mentions of the text", "missing", field="mention_BST"
            )
        weight_BST = mention_BST.to(tokens_BTD.dtype)
        if self.pool == "starts":
            weight_BST = weight_BST * (weight_BST.cumsum(dim=2) == 1)
        weight_BST = weight_BST / weight_BST.sum(dim=2, keepdim=True).clamp(min=1)
        return torch.einsum("bst,btd->bsd", weight_BST, tokens_BTD).flatten(1)
