"""Visual question answering on any fusion-encoder, by a classifier over a vocabulary of answers
or by a decoder.
"""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from medvl import losses
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.losses.pairs.image_text import ramped_alpha
from medvl.losses.supervised import word_log_probability
from medvl.models.base import init_weights
from medvl.models.downstream.fused_classifier import FusionTask, described_fusion, open_fusion
from medvl.models.downstream.vqa.decoder import (
    AnswerDecoder,
    AnswerWriter,
    DecoderConfig,
    Head,
    Memory,
    VQAConfig,
    init_decoder,
)
from medvl.models.downstream.vqa.prior import QuestionPrior
from medvl.models.fusion_encoders.bases.base import FusionModel, StreamConfig
from medvl.models.fusion_encoders.parts.encoder import Fused
from medvl.models.registry import register_system
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch, Losses

# Answer heads on the states of any fusion-encoder: classifiers, and a decoder that ranks or
# writes answers.
#
# B questions, V answers of the vocabulary, K answers of a shortlist, T tokens of an answer, S
# tokens of K answers including padding, N without it, C tokens that are read, D width.

_ANSWERS_AT_ONCE = 128
_WORDS_AT_ONCE = 2048
"""Chunk sizes of a ranking pass: they limit its memory and change no result."""


class AnswerPredictions(NamedTuple):
    """The answer to each question of a batch."""

    answers: list[str]
    score_B: Tensor
    """float32, within [0, 1]: the head's probability of its answer."""


class _Classifier(nn.Sequential, abc.ABC):
    """Layers from one vector for each question to an independent logit for each answer,
    initialised as BERT's.
    """

    reads_pooled = True
    """Whether the head reads `Fused.pooled_BD`."""

    def __init__(self, answers: Sequence[str], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._answers = tuple(answers)
        init_weights(self)

    @abc.abstractmethod
    def vector(self, fused: Fused) -> Tensor:
        """(B, D): the input of the layers."""

    def loss(self, fused: Fused, target_BV: Tensor) -> Tensor:
        """Return the loss for targets within [0, 1]; a row of zeros has no answer in the
        vocabulary.
        """
        return losses.vqa_bce(self.scores(fused), target_BV)

    def scores(self, fused: Fused) -> Tensor:
        """Return the logits (B, V)."""
        logits_BV: Tensor = self(self.vector(fused))
        return logits_BV

    def predict(self, fused: Fused) -> AnswerPredictions:
        """Return the best answers."""
        return self.choose(self.scores(fused))

    def choose(self, logits_BV: Tensor) -> AnswerPredictions:
        """Return the best answers by their logits."""
        best_B, place_B = logits_BV.float().max(dim=1)
        return AnswerPredictions(
            [self._answers[place] for place in place_B.tolist()], best_B.sigmoid()
        )

    def start_from_zero(self) -> None:
        """Make the last layer give logits of 0, to be added to others."""
        last = self[-1]
        assert isinstance(last, nn.Linear), "the last layer gives the logits"
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)


class ClassifierHead(_Classifier):
    """Linear, LayerNorm, GELU, Linear on the pooled vector (METER and M3AE, card 1.1)."""

    def __init__(self, width: int, answers: Sequence[str]) -> None:
        super().__init__(
            answers,
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, len(answers)),
        )

    def vector(self, fused: Fused) -> Tensor:
        """Return the pooled vector."""
        return fused.pooled_BD


class ProductHead(_Classifier):
    """Linear, ReLU, Linear on the product of CLS and the first SEP (MedViLL; VLP, Zhou et al.,
    arXiv 1909.11059).

    Needs a system whose `Fused.image` starts with CLS and ends with SEP. The published head can
    never give its first answer; this one can.
    """

    reads_pooled = False

    def __init__(self, width: int, answers: Sequence[str]) -> None:
        super().__init__(
            answers, nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, len(answers))
        )

    def vector(self, fused: Fused) -> Tensor:
        """Return the product of the two tokens around the image."""
        block_BND = fused.image.states_BND
        return block_BND[:, 0] * block_BND[:, -1]


class DecoderHead(nn.Module):
    """An `AnswerDecoder` that ranks the answers of the vocabulary or writes its own.

    It reads `FusionModel.answer_memory`. Answers with equal tokens are one answer to this head,
    which returns the first of them. An answer with a word unknown to the tokenizer can be ranked,
    but is never written.

    With `config.decoder.alpha` it also learns the soft targets of a moving average of the model
    (`VQA`).

    Raises ConfigError if the model has no tokenizer, an answer has no token, or the sizes do not
    fit.
    """

    reads_pooled = False

    ids_VT: Tensor
    length_V: Tensor

    def __init__(self, config: VQAConfig, model: FusionModel) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = model.require_tokenizer(f"head {config.head!r}")
        ids_VT, mask_VT = self.tokenizer.for_answers()(config.answers)
        length_V = mask_VT.sum(dim=1).clamp(max=config.decoder.max_tokens)
        if length_V.min() < 3:
            number = int(length_V.argmin()) + 1
            raise ConfigError(
                f"answer {number} has no token; remove it", "unsupported", field="answers"
            )
        ids_VT = ids_VT[:, : int(length_V.max())].scatter(
            1, length_V[:, None] - 1, self.tokenizer.sep_id
        )
        self.register_buffer("ids_VT", ids_VT, persistent=False)
        self.register_buffer("length_V", length_V, persistent=False)
        answers = zip(ids_VT.tolist(), length_V.tolist(), config.answers, strict=True)
        self._answer_of = {
            tuple(ids[1 : length - 1]): answer for ids, length, answer in reversed(list(answers))
        }
        self._read_states = model.answer_memory
        self.decoder = AnswerDecoder(config.decoder, model.fused_dim, model.text_encoder.vocab_size)
        init_decoder(self.decoder, model)

    def loss(self, fused: Fused, target_BV: Tensor) -> Tensor:
        """Return the loss for targets within [0, 1]; answers above 0 are predicted word by word."""
        return self.distilled_loss(fused, target_BV, None, 0.0)

    def distilled_loss(
        self, fused: Fused, target_BV: Tensor, teacher_NV: Tensor | None, alpha: float | Tensor
    ) -> Tensor:
        """Return the loss with soft targets; a share `alpha` is from `teacher_NV`, the teacher's
        `score_targets`.
        """
        logits_NV, ids_N, weight_N = self.score_targets(fused, target_BV)
        return losses.answer_words(logits_NV, ids_N, weight_N, len(target_BV), teacher_NV, alpha)

    def score_targets(self, fused: Fused, target_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (N, V) of the words of all right answers, the words (N,), and their
        answers' targets (N,).
        """
        row_N, answer_N = (target_BV > 0).nonzero().unbind(dim=1)
        mask_NT = self._mask(answer_N)
        ids_NT = self.ids_VT[answer_N, : mask_NT.shape[1]]
        given_NT = ids_NT[:, :-1]
        next_NT = ids_NT[:, 1:]
        real_NT = mask_NT[:, 1:]
        place_T = torch.arange(given_NT.shape[1], device=ids_NT.device)
        memory = self.decoder.read(self._read_states(fused).rows(row_N))
        states_NTD, _ = self.decoder(given_NT, place_T, memory, (place_T <= place_T[:, None])[None])
        weight_NT = target_BV[row_N, answer_N, None].expand_as(real_NT)
        return self.decoder.score_words(states_NTD[real_NT]), next_NT[real_NT], weight_NT[real_NT]

    def scores(self, fused: Fused) -> Tensor:
        """Return the log-likelihoods (B, V), minus infinity for answers that are not on the
        shortlist.

        The sum of the log-probabilities of an answer's words and its closing token, not divided by
        their number. With `config.decoder.first_word` "twice" the first word counts twice (ALBEF's
        `rank_answer`).
        """
        decoder = self.decoder
        settings = self.config.decoder
        memory = decoder.read(self._read_states(fused))
        first_B1 = self.ids_VT[:1, :1].expand(len(fused.pooled_BD), 1)
        states_B1D, memory = decoder(first_B1, first_B1.new_zeros(1), memory)
        first_id_V = self.ids_VT[:, 1]
        first_BV = decoder.score_words(states_B1D[:, 0]).float().log_softmax(dim=1)[:, first_id_V]
        # stable: answers with equal first words keep their order on every device
        chosen_BK = first_BV.sort(dim=1, descending=True, stable=True).indices[
            :, : settings.shortlist
        ]
        rest_BK = torch.cat(
            [self._rest(some_BK, memory) for some_BK in chosen_BK.split(_ANSWERS_AT_ONCE, 1)], dim=1
        )
        times = 2 if settings.first_word == "twice" else 1
        return torch.full_like(first_BV, -torch.inf).scatter(
            1, chosen_BK, times * first_BV.gather(1, chosen_BK) + rest_BK
        )

    def predict(self, fused: Fused) -> AnswerPredictions:
        """Return the best answers."""
        if self.config.head == "generation":
            return self.write(fused)
        best_B, place_B = self.scores(fused).max(dim=1)
        return AnswerPredictions(
            [self.config.answers[place] for place in place_B.tolist()], best_B.exp()
        )

    def write(self, fused: Fused) -> AnswerPredictions:
        """Decode answers: the answer of the vocabulary with the same tokens if there is one,
        else the text.
        """
        tokenizer = self.tokenizer
        settings = self.config.decoder
        special = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, tokenizer.mask_id)
        generated = search(
            AnswerWriter(
                self.decoder, self.decoder.read(self._read_states(fused)), tokenizer.cls_id
            ),
            Decoding(beams=settings.beams),
            max_tokens=settings.max_tokens - 1,
            end_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            never=[token for token in special if token is not None and token != tokenizer.sep_id],
        )
        rows = zip(generated.ids_BT.cpu(), generated.mask_BT.cpu(), strict=True)
        id_lists = [ids_T[mask_T].tolist() for ids_T, mask_T in rows]
        answers = [self._answer_of.get(tuple(ids)) or tokenizer.decode(ids) for ids in id_lists]
        return AnswerPredictions(answers, generated.score_B.exp())

    def _rest(self, chosen_BK: Tensor, memory: Memory) -> Tensor:
        """(B, K): log-probability of the tokens after the first word of these answers.

        The answers of a question are packed into one row without padding; words attend to their own
        answer only. Most answers have one or two words, but the longest of VQA-RAD has over twenty.
        """
        mask_BKT = self._mask(chosen_BK)
        ids_BKT = self.ids_VT[chosen_BK][:, :, : mask_BKT.shape[2]]
        given_BS = ids_BKT[:, :, 1:-1].flatten(1)
        next_BS = ids_BKT[:, :, 2:].flatten(1)
        real_BS = mask_BKT[:, :, 2:].flatten(1)
        most = int(real_BS.sum(dim=1).max())
        order_BN = (~real_BS).sort(dim=1, stable=True).indices[:, :most]
        real_BN = real_BS.gather(1, order_BN)
        steps = mask_BKT.shape[2] - 2
        answer_BN = order_BN // steps
        place_BN = order_BN % steps + 1
        seen_BNN = (answer_BN[:, :, None] == answer_BN[:, None]) & (
            place_BN[:, None] <= place_BN[:, :, None]
        )
        start_BN1 = torch.ones_like(seen_BNN[:, :, :1])  # all answers share the first token
        states_BND, _ = self.decoder(
            given_BS.gather(1, order_BN), place_BN, memory, torch.cat([start_BN1, seen_BNN], dim=2)
        )
        states_ND = states_BND[real_BN]
        next_N = next_BS.gather(1, order_BN)[real_BN]
        pairs = zip(states_ND.split(_WORDS_AT_ONCE), next_N.split(_WORDS_AT_ONCE), strict=True)
        log_N = torch.cat(
            [word_log_probability(self.decoder.score_words(states), ids) for states, ids in pairs]
        )
        log_BN = log_N.new_zeros(real_BN.shape).masked_scatter(real_BN, log_N)
        log_BS = log_BN.new_zeros(real_BS.shape).scatter(1, order_BN, log_BN)
        return log_BS.unflatten(1, (chosen_BK.shape[1], steps)).sum(dim=2)

    def _mask(self, answer: Tensor) -> Tensor:
        """(..., T): True on the tokens of these answers; T is the longest length."""
        length = self.length_V[answer]
        longest = int(length.max()) if length.numel() else 0
        return torch.arange(longest, device=length.device) < length[..., None]


def create_head(
    config: VQAConfig, model: FusionModel
) -> ClassifierHead | ProductHead | DecoderHead:
    """Create a head for a fusion-encoder.

    Raises ConfigError if the head "product" or a decoder does not fit the model.
    """
    if config.head == "classifier":
        return ClassifierHead(model.pooled_dim, config.answers)
    if config.head == "product":
        if not model.image_between_text_tokens:
            message = (
                f"head 'product' needs an image between two text tokens, as in medvill; "
                f"{model.name} has none"
            )
            raise ConfigError(message, "unsupported", field="head")
        return ProductHead(model.pooled_dim, config.answers)
    return DecoderHead(config, model)


class Answerer(nn.Module):
    """The modules of a model that have a moving average: fusion-encoder and decoder, shared and
    not copied.
    """

    def __init__(self, fusion_model: FusionModel, answer_head: DecoderHead) -> None:
        super().__init__()
        self.fusion_model = fusion_model
        self.answer_head = answer_head


@register_system("vqa")
class VQA(FusionTask):
    """A fusion-encoder with the answer head `config.head` (`medvl.models.downstream.vqa.model`).

    The text of a batch is the question and its labels are the answers: column v of `labels_BL` is 1
    if answer v of `config.answers` is right (`medvl.data.loading.studies.QuestionSource`).

    Attributes:
        momentum: with a decoder and `config.decoder.alpha`, the moving average (`Answerer`) of
            fusion-encoder and head, which gives soft targets in training; else None. It starts as a
            copy in the first step.
        question_prior: with `config.question_prior`, the answers that the words suggest; else None.
    """

    Config = VQAConfig
    head_name = "answer_head"

    def __init__(self, config: VQAConfig, fusion_model: FusionModel) -> None:
        super().__init__(config, fusion_model)
        fusion_model.image_times = None
        if config.earlier_image:
            if fusion_model.inputs.regions:
                message = f"expected a model of pixels, got regions of {fusion_model.name}"
                raise ConfigError(message, "unsupported", field="earlier_image")
            fusion_model.read_earlier_images()
            self.inputs = dataclasses.replace(self.inputs, prior_image=True)
        self.answer_head = create_head(config, fusion_model)
        self.freeze_unread(reads_pooled=self.answer_head.reads_pooled)
        self.question_prior: QuestionPrior | None = None
        if config.question_prior:
            assert isinstance(self.answer_head, _Classifier), "the config allows no other head"
            self.answer_head.start_from_zero()
            self.question_prior = QuestionPrior(len(config.answers))
        if config.frozen_encoders:
            _freeze_encoders(fusion_model)
        self.momentum: AveragedModel | None = None
        if isinstance(self.answer_head, DecoderHead) and config.decoder.alpha:
            average = get_ema_multi_avg_fn(config.decoder.momentum)
            self.momentum = AveragedModel(
                Answerer(fusion_model, self.answer_head), multi_avg_fn=average
            )
            self.momentum.requires_grad_(False)

    @classmethod
    def on(
        cls,
        fusion_model: FusionModel,
        answers: Sequence[str],
        *,
        head: Head = "classifier",
        decoder: DecoderConfig | None = None,
        head_lr_mult: float | None = None,
        earlier_image: bool = False,
        question_prior: Sequence[tuple[str, str]] = (),
        frozen_encoders: bool = False,
    ) -> Self:
        """Put a new head on a fusion-encoder, which is not copied unless `for_reading` changes it.

        Raises as `create_vqa`.
        """
        fusion_model = fusion_model.for_reading()
        config = VQAConfig(
            **described_fusion(fusion_model),
            answers=tuple(answers),
            head=head,
            decoder=decoder or DecoderConfig(),
            head_lr_mult=head_lr_mult,
            earlier_image=earlier_image,
            question_prior=bool(question_prior),
            frozen_encoders=frozen_encoders,
        )
        model = cls(config, fusion_model)
        if question_prior:
            model.fit_prior(question_prior)
        return model

    def fit_prior(self, questions: Sequence[tuple[str, str]]) -> None:
        """Fit `question_prior` to training questions and their normalised answers, of which those
        outside of the vocabulary are left out.

        Raises ConfigError for a model without a tokenizer, and where no answer is left.
        """
        assert self.question_prior is not None, "config.question_prior is set"
        place_of = {answer: place for place, answer in enumerate(self.config.answers)}
        known = [(text, place_of[answer]) for text, answer in questions if answer in place_of]
        ids_NT, mask_NT = self.require_tokenizer("a prior of questions")(
            [text for text, _ in known] or [""]
        )
        self.question_prior.fit(ids_NT, mask_NT, [place for _, place in known])

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of the answers; the labels of an answer outside the vocabulary are zeros.

        Raises ConfigError in training mode if `before_step` was never called for the moving
        average.
        """
        fused = self.fusion_model.features(batch)
        target_BV = batch.labels_BL.nan_to_num(0.0)
        head = self.answer_head
        if self.question_prior is not None and isinstance(head, _Classifier):
            own_BV = target_BV if self.training else None
            prior_BV = self.question_prior(batch.ids_BT, batch.mask_BT, own_BV)
            return Losses.sum(answers=losses.vqa_bce(head.scores(fused) + prior_BV, target_BV))
        if self.momentum is None or not self.training or not isinstance(head, DecoderHead):
            return Losses.sum(answers=head.loss(fused, target_BV))
        steps = int(self.momentum.n_averaged)
        if not steps:
            message = (
                "expected before_step(step) before the forward pass of each optimiser "
                "step; call it in your loop"
            )
            raise ConfigError(message, "missing", field="before_step")
        teacher: Any = self.momentum.module
        with torch.no_grad():
            teacher_NV, *_ = teacher.answer_head.score_targets(
                teacher.fusion_model.features(batch), target_BV
            )
        alpha = ramped_alpha(steps - 1, self.config.decoder.ramp_steps, self.config.decoder.alpha)
        return Losses.sum(answers=head.distilled_loss(fused, target_BV, teacher_NV, alpha))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Move the moving average towards the model."""
        if self.momentum is not None and isinstance(self.answer_head, DecoderHead):
            self.momentum.update_parameters(Answerer(self.fusion_model, self.answer_head))

    def answer_logits(self, batch: Batch) -> Tensor:
        """(B, V): scores of `config.answers`. A decoder's are log-likelihoods, minus infinity for
        answers off the shortlist.
        """
        logits_BV = self.answer_head.scores(self.fusion_model.features(batch))
        if self.question_prior is None:
            return logits_BV
        prior_BV: Tensor = self.question_prior(batch.ids_BT, batch.mask_BT)
        return logits_BV + prior_BV

    def predict(self, batch: Batch) -> AnswerPredictions:
        """Return the answer to each question of a batch."""
        if self.question_prior is not None and isinstance(self.answer_head, _Classifier):
            return self.answer_head.choose(self.answer_logits(batch))
        return self.answer_head.predict(self.fusion_model.features(batch))

    @torch.no_grad()
    def answer(self, image_BCHW: Tensor, questions: Sequence[str]) -> list[str]:
        """Return the likeliest answer to each question about its image.

        Raises ConfigError without a tokenizer, and for unequal numbers of images and questions.
        """
        batch = self.make_batch(image_BCHW, questions, *self.tokenize(list(questions)))
        return self.predict(batch).answers


def _freeze_encoders(model: FusionModel) -> None:
    """Freeze both encoders. Raises ConfigError where they are not below a separate
    fusion-encoder of pixels.
    """
    image, text = model.image_encoder, model.text_encoder
    if not isinstance(image, ImageEncoder) or not hasattr(model, "fusion"):
        message = f"expected a fusion-encoder on two encoders, such as m3ae, got {model.name}"
        raise ConfigError(message, "unsupported", field="frozen_encoders")
    image.freeze()
    text.freeze()


def create_vqa(
    start: Path | str,
    answers: Sequence[str],
    *,
    fusion: StreamConfig,
    image_size: int | None = None,
    head: Head = "classifier",
    decoder: DecoderConfig | None = None,
    head_lr_mult: float | None = None,
    earlier_image: bool = False,
    question_prior: Sequence[tuple[str, str]] = (),
    frozen_encoders: bool = False,
) -> VQA:
    """Create a VQA model with a new head from a checkpoint of a dual-encoder or fusion-encoder.

    Args:
        start: checkpoint of a fusion-encoder, which is used completely; of a VQA model, whose head
            is replaced; or of a dual-encoder, whose towers are used under a new fusion-encoder.
        answers: the normalised vocabulary.
        fusion: sizes of that new fusion-encoder; its settings of the encoders are replaced by those
            of `start`.
        image_size: side of the images in pixels, to which learned positions are interpolated; None:
            as in `start`.
        head: see `VQAConfig`.
        decoder: sizes of the decoder of the heads "ranking" and "generation"; ALBEF's by default.
        head_lr_mult: learning rate of the head, as a multiple of the encoders'; None is the head's
            published one.
        earlier_image: see `VQAConfig`.
        question_prior: training questions and their normalised answers, to start from the answers
            of the question alone; empty: a head without them.
        frozen_encoders: see `VQAConfig`.

    Raises:
        CheckpointError: `start` is not a complete checkpoint.
        ConfigError: the vocabulary has fewer than two answers, or the head or the image size does
            not fit the model.
    """
    model = open_fusion(start, fusion, image_size)
    return VQA.on(
        model,
        answers,
        head=head,
        decoder=decoder,
        head_lr_mult=head_lr_mult,
        earlier_image=earlier_image,
        question_prior=question_prior,
        frozen_encoders=frozen_encoders,
    )
