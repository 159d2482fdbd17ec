"""Base of report generators: the next-token loss over a batch's complete samples, decoding, and
prompts.

Letters: as in `medvl.schema`; V words, K complete samples.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import ANY
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import (
    ImageConfig,
    System,
    complete_rows,
    update_mean,
    zero_loss,
)
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.transformer import (
    KeysValues,
    Sizes,
    open_empty_rows,
    padding_mask,
    split_heads,
)
from medvl.models.text_decoding import Decoding, Generated, NextToken, search
from medvl.schema import Batch, Losses

_BEAMS = Decoding(beams=3)
IGNORED = -100
"""Target of tokens that have none."""
Objective = Callable[["ReportGenerator", Batch], Losses]
"""Function of a generator and a training batch, in place of the loss of words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(ImageConfig):
    """Base of the settings of report generators."""

    former = (("rewards", ANY),)


class ReportGenerator(System):
    """Base of systems that read the images of a sample and write its text, one token after another.

    The loss, "words", is the mean cross-entropy of all words of a batch, each predicted from the
    image and the true words before it. Samples without an image or a text are left out. A text that
    fills `config.max_tokens` may have been cut, so its last token is not a target. The unknown word
    is a target, and is never written.

    `medvl.train.RewardConfig` trains on rewards of sampled texts in place of it.
    """

    shared_encoders = ("image_encoder",)
    reads_images = True
    """Whether texts are written from images; else samples need none."""

    @abc.abstractmethod
    def read(self, batch: Batch) -> Tokens:
        """Encode what a report is written from: the images of each sample, and all else that the
        system reads.
        """

    @abc.abstractmethod
    def score_next(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        """(B, T, V): scores of the word after each token."""

    @abc.abstractmethod
    def writer(self, image: Tokens, first_id: int) -> NextToken:
        """Return a writer of texts about the images that begin with a token; it caches the
        states of earlier tokens.
        """

    def forward(self, batch: Batch, objective: Objective | None = None) -> Losses:
        """Return the loss of words of a training batch, or of another objective."""
        if objective is not None:
            return objective(self, batch)
        if not (batch.has_image_B is None and batch.has_text_B is None):
            row_K = self.trained_rows(batch)
            if not len(row_K):
                return Losses.sum(words=zero_loss(self))
            batch = batch.rows(row_K.tolist())
        ids_BT, target_BT = self.words_and_targets(batch)
        total = self.word_loss(ids_BT, target_BT, self.read(batch))
        return Losses.sum(words=update_mean(batch, total, (target_BT != IGNORED).sum()))

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many words the loss of a batch is a sum over."""
        _, target_BT = self.words_and_targets(batch.rows(self.trained_rows(batch).tolist()))
        return (target_BT != IGNORED).sum().float()[None]

    def word_loss(self, ids_BT: Tensor, target_BT: Tensor, image: Tokens) -> Tensor:
        """(): the sum of the cross-entropies of all targets."""
        scores_BTV = self.score_targets(ids_BT, image)
        return F.cross_entropy(
            scores_BTV.flatten(0, 1).float(),
            target_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def score_targets(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        """(B, T, V): scores of the targets of `words_and_targets`."""
        return self.score_next(ids_BT, image)

    def score_words(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        """(B, T, V): scores of each word of texts, given the words before it."""
        first_B1 = torch.full_like(ids_BT[:, :1], self.require_tokenizer("writing").cls_id)
        return self.score_next(torch.cat([first_B1, ids_BT[:, :-1]], dim=1), image)

    def texts_of(self, ids_BT: Tensor, mask_BT: Tensor) -> list[str]:
        """Return the texts of token ids, without words of the system's own."""
        tokenizer = self.require_tokenizer("writing")
        plain_BT = (mask_BT & (ids_BT < tokenizer.vocab_size)).cpu()
        return [
            tokenizer.decode(ids_T[mask_T])
            for ids_T, mask_T in zip(ids_BT.cpu(), plain_BT, strict=True)
        ]

    @property
    def longest_text(self) -> int:
        """Maximum number of written tokens, including the closing one."""
        return int(self.config.max_tokens) - 1

    def never_written(self) -> list[int]:
        """Return the ids that are never written: the unknown word."""
        tokenizer = self.require_tokenizer("writing")
        return [] if tokenizer.unk_id is None else [tokenizer.unk_id]

    def trained_rows(self, batch: Batch) -> Tensor:
        """Return (K,) int64: the rows of a batch that have an image, if images are read, and a
        text.
        """
        return complete_rows(
            batch if self.reads_images else dataclasses.replace(batch, has_image_B=None)
        )

    def words_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens of reports that predict another one, and that token, (B, T) each."""
        return batch.ids_BT[:, :-1], self._targets(batch.ids_BT, batch.mask_BT)

    def _targets(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T - 1): the token after each token."""
        place_T = torch.arange(1, ids_BT.shape[1], device=ids_BT.device)
        may_be_cut_T = place_T == self.config.max_tokens - 1
        return ids_BT[:, 1:].masked_fill(~mask_BT[:, 1:] | may_be_cut_T, IGNORED)

    @torch.no_grad()
    def write_reports(self, batch: Batch, *, decoding: Decoding = _BEAMS) -> Generated:
        """Return a text for each image of a batch, or several with sampling; its texts are not
        read.

        Raises ConfigError in training mode, and without a tokenizer.
        """
        if self.training:
            raise ConfigError("write_reports needs eval mode; call eval() first", "conflict")
        tokenizer = self.require_tokenizer("writing")
        return search(
            self.writer(self.read(batch), tokenizer.cls_id),
            decoding,
            max_tokens=decoding.max_tokens or self.longest_text,
            end_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            never=self.never_written(),
        )


# Pre-norm Transformer layers with the norm of R2Gen's code, with caches for writing.
#
# Letters: B samples, R rows that are written (those of a sample side by side), N tokens, Q
# queries, P image tokens, T new tokens, W tokens written before, K = W + T, M memory slots, D
# width.

_EPS = 1e-6
_SMALLEST_VARIANCE = 1e-12
_PERIODS = 10_000.0
_INITIAL_BIAS = 0.1


def standardize(states: Tensor) -> Tensor:
    """Subtract the mean of the last axis and divide by its unbiased standard deviation plus 1e-6,
    never in 16 bits.

    PyTorch's LayerNorm divides by the square root of the biased variance plus its epsilon.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    deviation = states.var(dim=-1, keepdim=True).clamp(min=_SMALLEST_VARIANCE).sqrt()
    return (states - states.mean(dim=-1, keepdim=True)) / (deviation + _EPS)


class Norm(nn.Module):
    """`standardize` with a learned scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, states: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return self.weight * standardize(states) + self.bias


class ConditionalNorm(nn.Module):
    """Norm whose scale and shift depend on the memory (R2Gen, section 2.3): gamma + MLP(m), beta
    + MLP(m).
    """

    def __init__(self, width: int, slots: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.weight_change, self.bias_change = (
            nn.Sequential(nn.Linear(slots * width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(2)
        )
        for name, parameter in self.named_parameters():
            if name.endswith(("change.0.bias", "change.2.bias")):
                nn.init.constant_(parameter, _INITIAL_BIAS)

    def forward(self, states_RTD: Tensor, memory_RTMD: Tensor) -> Tensor:
        """(R, T, D), from the memory after each token."""
        flat = memory_RTMD.flatten(2)
        weight_RTD = self.weight + self.weight_change(flat)
        bias_RTD = self.bias + self.bias_change(flat)
        return weight_RTD * standardize(states_RTD) + bias_RTD


class Attention(nn.Module):
    """Multi-head attention without residual and norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def keys_values(self, context_BND: Tensor) -> KeysValues:
        """Project tokens to keys and values, (B, heads, N, D / heads) each."""
        return split_heads(self.key(context_BND), self.heads), split_heads(
            self.value(context_BND), self.heads
        )

    def attend(
        self, states_BQD: Tensor, keys_values: KeysValues, mask_BQK: Tensor | None = None
    ) -> Tensor:
        """(B, Q, D): attend to keys and values where the mask is True; a query with an empty
        mask to all.
        """
        attended_BHQd = F.scaled_dot_product_attention(
            split_heads(self.query(states_BQD), self.heads),
            *keys_values,
            attn_mask=None if mask_BQK is None else open_empty_rows(mask_BQK)[:, None],
            dropout_p=self.dropout if self.training else 0.0,
        )
        attended_BQD: Tensor = self.out(attended_BHQd.transpose(1, 2).flatten(2))
        return attended_BQD


class FeedForward(nn.Sequential):
    """Linear, ReLU, dropout, linear."""

    def __init__(self, sizes: Sizes) -> None:
        inner = nn.Linear(sizes.width, sizes.intermediate)
        outer = nn.Linear(sizes.intermediate, sizes.width)
        super().__init__(inner, nn.ReLU(), nn.Dropout(sizes.dropout), outer)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each after a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes.width, sizes.heads, sizes.dropout)
        self.feed_forward = FeedForward(sizes)
        self.norms = nn.ModuleList(Norm(sizes.width) for _ in range(2))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, states_BND: Tensor, mask_B1N: Tensor | None) -> Tensor:
        """(B, N, D) to the same shape."""
        normed_BND = self.norms[0](states_BND)
        keys_values = self.attention.keys_values(normed_BND)
        states_BND = states_BND + self.dropout(
            self.attention.attend(normed_BND, keys_values, mask_B1N)
        )
        output_BND: Tensor = states_BND + self.dropout(self.feed_forward(self.norms[1](states_BND)))
        return output_BND


class ImageLayers(nn.Module):
    """The encoder: layers and a final norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)

    def forward(self, tokens: Tokens) -> Tokens:
        """Return encoded tokens; padding is not attended to."""
        states_BND = tokens.states_BND
        mask_B1N = padding_mask(tokens.mask_BN)
        for layer in self.layers:
            states_BND = layer(states_BND, mask_B1N)
        return Tokens(self.norm(states_BND), tokens.mask_BN)


class WritingState(NamedTuple):
    """Cache of a decoder between two steps."""

    read: tuple[KeysValues, ...]
    """Keys and values of the image, by layer: B rows."""
    read_mask_B1P: Tensor | None
    written: tuple[KeysValues, ...] | None
    """Keys and values of the text so far, by layer: R rows. None: nothing is written."""
    memory_RMD: Tensor

    def rows(self, index_R: Tensor) -> "WritingState":
        """Select rows by index; each must stay with its sample."""
        keys_values = (
            None
            if self.written is None
            else tuple((k[index_R], v[index_R]) for k, v in self.written)
        )
        return self._replace(written=keys_values, memory_RMD=self.memory_RMD[index_R])


class DecoderLayer(nn.Module):
    """Attention to the text so far and to the image, feed-forward; each after a norm that
    depends on the memory.
    """

    def __init__(self, sizes: Sizes, slots: int) -> None:
        super().__init__()
        self.attention = Attention(sizes.width, sizes.heads, sizes.dropout)
        self.cross_attention = Attention(sizes.width, sizes.heads, sizes.dropout)
        self.feed_forward = FeedForward(sizes)
        self.norms = nn.ModuleList(ConditionalNorm(sizes.width, slots) for _ in range(3))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(
        self,
        states_RTD: Tensor,
        memory_RTMD: Tensor,
        written: KeysValues | None,
        mask_RTK: Tensor | None,
        read: KeysValues,
        read_mask_B1P: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states (R, T, D), and the keys and values of all tokens written so far."""
        normed_RTD = self.norms[0](states_RTD, memory_RTMD)
        keys_values = self.attention.keys_values(normed_RTD)
        if written is not None:
            keys_values = (
                torch.cat([written[0], keys_values[0]], dim=2),
                torch.cat([written[1], keys_values[1]], dim=2),
            )
        states_RTD = states_RTD + self.dropout(
            self.attention.attend(normed_RTD, keys_values, mask_RTK)
        )
        normed_RTD = self.norms[1](states_RTD, memory_RTMD)
        # Queries do not attend to each other here, so all rows of a sample share its keys and
        # values.
        query_BQD = normed_RTD.reshape(len(read[0]), -1, normed_RTD.shape[2])
        crossed_BQD = self.cross_attention.attend(query_BQD, read, read_mask_B1P)
        states_RTD = states_RTD + self.dropout(crossed_BQD.view_as(states_RTD))
        states_RTD = states_RTD + self.dropout(
            self.feed_forward(self.norms[2](states_RTD, memory_RTMD))
        )
        return states_RTD, keys_values


def sines(place_T: Tensor, width: int) -> Tensor:
    """(T, D): sines in even and cosines in odd columns (Vaswani et al., arXiv 1706.03762,
    section 3.5).
    """
    rate_F = torch.exp(
        torch.arange(0, width, 2, device=place_T.device) * (-math.log(_PERIODS) / width)
    )
    angle_TF = place_T[:, None] * rate_F
    return torch.stack([angle_TF.sin(), angle_TF.cos()], dim=2).flatten(1)


def groups_by_part(
    model: nn.Module, image_lr_mult: float, lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Return optimiser groups of a model's parts: the image encoder at `image_lr_mult` times the
    rate of all others.
    """
    groups: list[dict[str, Any]] = []
    for name, child in model.named_children():
        rate = lr * (image_lr_mult if name == "image_encoder" else 1.0)
        groups += [
            {**each, "name": f"{name}: {each['name']}"}
            for each in parameter_groups(child, rate, weight_decay)
        ]
    return groups


# Prompts: what is known about a study before its report, as token ids.

_PRIOR = "prior "
"""Prefix of the names of sections of the prior report."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A `medvl.schema.WritesPrompts`: a heading and the tokens of each section that exists, between
    fixed tokens, of which one is the image's marker.
    """

    tokenizer: Tokenizer
    before: tuple[int, ...] = ()
    """Ids at the start."""
    headings: Mapping[str, tuple[int, ...]]
    """Section -> ids of its heading, in the order of the prompt. "prior findings" are the findings
    of the prior report.
    """
    after: tuple[int, ...] = ()
    """Ids at the end."""
    answer: tuple[int, ...] = ()
    """Ids at the end in place of `after`, where the section "question" exists."""
    max_tokens: int
    """Maximum number of tokens of each section but a question."""

    @property
    def reads_prior(self) -> bool:
        """Whether the prior report is read."""
        return any(name.startswith(_PRIOR) for name in self.headings)

    def __call__(
        self, sections: Mapping[str, str], prior: Mapping[str, str] | None
    ) -> tuple[int, ...]:
        """Return the ids of a prompt."""
        ids = [*self.before]
        for name, heading in self.headings.items():
            is_prior = name.startswith(_PRIOR)
            known = (prior or {}) if is_prior else sections
            text = known.get(name.removeprefix(_PRIOR), "")
            if text.strip():
                end = None if name == "question" else self.max_tokens
                ids += [*heading, *text_ids(self.tokenizer, text)[:end]]
        return *ids, *(self.answer if sections.get("question", "").strip() else self.after)


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text without its first and last token."""
    ids_1T, _ = tokenizer([text])
    ids: list[int] = ids_1T[0].tolist()
    if ids and ids[-1] == tokenizer.sep_id:
        ids.pop()
    return tuple(ids[1:] if ids and ids[0] == tokenizer.cls_id else ids)
