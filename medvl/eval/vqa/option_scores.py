"""Scores of the options of multiple-choice questions, for each kind of system.

| score | systems | score of an option |
|---|---|---|
| statement | dual-encoders | similarity of the image and the statement of question and option |
| matching | fusion-encoders with a matching head | log-odds of a match of image and statement |
| answers | fine-tuned on questions (`VQA`) | score of the option among the answers of the model |
| likelihood | report generators | log-probability of the statement's or the option's words |
| letter | causal language models | log-probability of the letter behind the listed options |

A statement is a template with {question} and {option}, such as "{option}."; with several
templates, its score is the mean over them. Only "letter" shows all options at once: only its scores
can depend on their order.

Shape letters: B questions of a batch, N images of a batch, Q pairs, M distinct texts, T tokens.
"""

import abc
import dataclasses
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.common.untrusted import read_json
from medvl.data.annotations import LETTERS, Question
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import embed_texts
from medvl.eval.retrieval.rerank import Encoded, check_matching, encode_texts, match_scores
from medvl.eval.retrieval.similarity import paired_similarity
from medvl.eval.vqa.protocol import AnswerVocabulary, VQAProtocol
from medvl.models.base import System
from medvl.models.downstream.ranking import as_matcher
from medvl.models.downstream.vqa.model import VQA
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.report_generators.base import ReportGenerator, text_ids
from medvl.models.report_generators.causal_lm import CausalLM
from medvl.schema import Batch

Score = Literal["auto", "statement", "matching", "answers", "likelihood", "letter"]
SCORES = get_args(Score)
TEMPLATES = ("{question} {option}",)
"""Statements of an option without other templates."""
_TEXTS = 64  # texts of report generators at a time


class OptionScores(NamedTuple):
    """Scores of the options of a question, in their order; NaN where the system has none."""

    scores: Sequence[float]
    """One for each option. For "likelihood", the sum of the log-probabilities of its tokens."""
    tokens: Sequence[int] = ()
    """Tokens of the scored texts, of "likelihood" only."""
    characters: Sequence[int] = ()
    """Their characters."""


class Templates:
    """Templates of statements by kind of question.

    Args:
        by_kind: kind -> templates; "" has those of all other kinds.

    Raises ConfigError for a template without {option}, or with other fields.
    """

    def __init__(self, by_kind: Mapping[str, Sequence[str]] | None = None) -> None:
        self.by_kind = {"": TEMPLATES, **{k: tuple(v) for k, v in (by_kind or {}).items()}}
        for template in (each for templates in self.by_kind.values() for each in templates):
            if not {"option"} <= _fields(template) <= {"option", "question"}:
                message = f"expected a template with {{option}} and {{question}}, got {template!r}"
                raise ConfigError(message, "malformed", field="templates")

    @classmethod
    def read(cls, path: Path) -> "Templates":
        """Read a JSON object of kind -> list of templates. Raises ConfigError."""
        content = read_json(path, ConfigError)
        lists = content.values() if isinstance(content, dict) else [None]
        for each in lists:
            if not (isinstance(each, list) and each and all(isinstance(t, str) for t in each)):
                message = f"{path}: expected an object of kinds with lists of templates"
                raise ConfigError(message, "malformed", field="templates")
        return cls(content)

    def statements(self, question: Question, option: str) -> list[str]:
        """Return the statements of an option."""
        templates = self.by_kind.get(question.kind, self.by_kind[""])
        return [each.format(question=question.question, option=option) for each in templates]


def _fields(template: str) -> set[str]:
    """Return the names in braces of a template; none where it is malformed, or formats them."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError:
        return set()
    plain = all(not form and conversion is None for _, form, conversion in parts)
    return {str(name) for name, *_ in parts} if plain else set()


class OptionScorer(abc.ABC):
    """A system that scores options."""

    name: ClassVar[Score]
    sees_all_options = False
    """Whether the options of a question are shown together, so that their order can matter."""
    scale = 1.0
    """Factor of the scores in the softmax over options: the inverse temperature of a dual-encoder,
    whose scores are cosines.
    """

    @abc.abstractmethod
    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        """Return the scores of the options of each row's question.

        Args:
            batch: on the model's device; its texts are the questions as they are asked.
            questions: their options.
        """


class _StatementScorer(OptionScorer):
    """Base of scorers that compare an image with statements."""

    def __init__(self, model: Any, templates: Templates) -> None:
        self.model = model
        self.templates = templates

    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        number_of: dict[str, int] = {}
        image_Q: list[int] = []
        text_Q: list[int] = []
        sizes = []
        images = range(len(batch)) if batch.image_of_B is None else batch.image_of_B.tolist()
        for image, text, question in zip(images, batch.texts, questions, strict=True):
            asked = dataclasses.replace(question, question=text)
            for option in question.options:
                statements = self.templates.statements(asked, option)
                text_Q += [number_of.setdefault(each, len(number_of)) for each in statements]
                image_Q += [image] * len(statements)
                sizes.append(len(statements))
        scores_Q = self.compare(batch, list(number_of), torch.tensor(image_Q), torch.tensor(text_Q))
        means = iter([float(part.mean()) for part in scores_Q.double().split(sizes)])
        return [OptionScores([next(means) for _ in question.options]) for question in questions]

    @abc.abstractmethod
    def compare(
        self, batch: Batch, texts: Sequence[str], image_Q: Tensor, text_Q: Tensor
    ) -> Tensor:
        """Return the scores (Q,) of pairs of an image of the batch and a text."""


class SimilarityScorer(_StatementScorer):
    """Similarity of a dual-encoder."""

    name: ClassVar[Score] = "statement"

    def __init__(self, model: DualEncoder, templates: Templates) -> None:
        super().__init__(model, templates)
        if model.learns_scale:
            self.scale = float(model.scale())
        elif hasattr(model.config, "temperature"):
            self.scale = 1 / model.config.temperature

    def compare(
        self, batch: Batch, texts: Sequence[str], image_Q: Tensor, text_Q: Tensor
    ) -> Tensor:
        images = self.model.embed_images(batch.image_BCHW)
        embedded = embed_texts(self.model, texts)
        return paired_similarity(self.model, images, embedded, image_Q, text_Q)


class MatchingScorer(_StatementScorer):
    """Log-odds of a match of a fusion-encoder."""

    name: ClassVar[Score] = "matching"

    def __init__(self, model: FusionModel, templates: Templates) -> None:
        check_matching(model)
        super().__init__(model, templates)

    def compare(
        self, batch: Batch, texts: Sequence[str], image_Q: Tensor, text_Q: Tensor
    ) -> Tensor:
        image = self.model.image_tokens(self.model.image_input_of(batch), batch.has_image_B)
        encoded = Encoded(image, encode_texts(self.model, texts))
        return match_scores(self.model, encoded, image_Q, text_Q)


class AnswerScorer(OptionScorer):
    """Scores of the answers of a model that was fine-tuned on questions.

    An option that is no answer of the model, after normalization, has no score.
    """

    name: ClassVar[Score] = "answers"

    def __init__(self, model: VQA, protocol: VQAProtocol) -> None:
        self.model = model
        self.protocol = protocol
        answers = [protocol.normalize(answer) for answer in model.config.answers]
        self._column = {answer: n for n, answer in reversed(list(enumerate(answers)))}
        self.vocabulary = AnswerVocabulary.of_model(model.config.answers, protocol)

    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        logits_BV = self.model.answer_logits(batch).float().cpu()
        scores = []
        for logits_V, question in zip(logits_BV, questions, strict=True):
            columns = [self._column.get(self.protocol.normalize(o)) for o in question.options]
            values = [float("nan") if n is None else float(logits_V[n]) for n in columns]
            scores.append(OptionScores(values))
        return scores


class LikelihoodScorer(OptionScorer):
    """Log-probability of the words of a statement, given the image; of an option, given image and
    question, where the system reads prompts.
    """

    name: ClassVar[Score] = "likelihood"
    scores_end = False
    """Whether the closing token counts: an answer ends there, a statement in a report does not."""

    def __init__(self, model: ReportGenerator, templates: Templates) -> None:
        self.model = model
        self.templates = templates
        self.tokenizer = model.require_tokenizer("scoring options")

    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        asked = [
            dataclasses.replace(question, question=text)
            for question, text in zip(questions, batch.texts, strict=True)
        ]
        read = self.model.read(self._inputs(batch, asked))
        texts = []
        row_Q = []
        for row, question in enumerate(asked):
            for option in question.options:
                statements = self._texts(question, option)
                texts += statements
                row_Q += [row] * len(statements)
        sums, tokens = [], []
        for start in range(0, len(texts), _TEXTS):
            part = slice(start, start + _TEXTS)
            rows = torch.tensor(row_Q[part], device=self.model.device)
            sum_Q, count_Q = self._log_probability(texts[part], read.rows(rows))
            sums += sum_Q.tolist()
            tokens += count_Q.tolist()
        return _collect(asked, row_Q, texts, sums, tokens)

    def _texts(self, question: Question, option: str) -> list[str]:
        return self.templates.statements(question, option)

    def _inputs(self, batch: Batch, questions: Sequence[Question]) -> Batch:
        """Return what the model reads for each question."""
        return _rows_with_images(batch)

    def _log_probability(self, texts: Sequence[str], read: Any) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities, and numbers of tokens."""
        end = (self.tokenizer.sep_id,) if self.scores_end else ()
        ids = [torch.tensor((*text_ids(self.tokenizer, text), *end)) for text in texts]
        if any(len(each) == len(end) for each in ids):
            raise EvaluationError("expected options with words", "empty", field="options")
        device = self.model.device
        ids_QT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        count_Q = torch.tensor([len(each) for each in ids], device=device)
        real_QT = torch.arange(ids_QT.shape[1], device=device) < count_Q[:, None]
        log_QTV = self.model.score_words(ids_QT, read).float().log_softmax(dim=2)
        log_QT = log_QTV.gather(2, ids_QT[:, :, None])[:, :, 0]
        return log_QT.where(real_QT, 0.0).sum(dim=1).cpu(), count_Q.cpu()


class PromptLikelihoodScorer(LikelihoodScorer):
    """Log-probability of the words of an option behind the image and the question, as a causal
    language model reads them.
    """

    scores_end = True

    def _texts(self, question: Question, option: str) -> list[str]:
        return [option]

    def _inputs(self, batch: Batch, questions: Sequence[Question]) -> Batch:
        # The model encodes an image once for all its questions.
        prompts = [self._prompt(question) for question in questions]
        longest = max(map(len, prompts))
        ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, ids in enumerate(prompts):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        length_B = torch.tensor([len(ids) for ids in prompts])
        mask_BT = torch.arange(longest) < length_B[:, None]
        device = self.model.device
        return dataclasses.replace(
            batch, prompt_ids_BT=ids_BT.to(device), prompt_mask_BT=mask_BT.to(device)
        )

    def _prompt(self, question: Question) -> tuple[int, ...]:
        assert isinstance(self.model, CausalLM)
        return self.model.question_prompt(self._asked(question))

    def _asked(self, question: Question) -> str:
        return question.question


class LetterScorer(PromptLikelihoodScorer):
    """Log-probability of the letter of an option behind image, question and lettered options."""

    name: ClassVar[Score] = "letter"
    sees_all_options = True

    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        asked = [
            dataclasses.replace(question, question=text)
            for question, text in zip(questions, batch.texts, strict=True)
        ]
        read = self.model.read(self._inputs(batch, asked))
        first_B1 = torch.zeros(len(asked), 1, dtype=torch.int64, device=self.model.device)
        log_BV = self.model.score_words(first_B1, read)[:, 0].float().log_softmax(dim=1).cpu()
        most = max(len(question.options) for question in questions)
        spellings = [self._spellings(letter) for letter in LETTERS[:most]]
        return [
            OptionScores(
                [float(log_V[spellings[n]].logsumexp(0)) for n in range(len(question.options))]
            )
            for log_V, question in zip(log_BV, questions, strict=True)
        ]

    def _spellings(self, letter: str) -> list[int]:
        """Return the tokens of a letter, with and without a blank before it."""
        known = {n for text in (letter, f" {letter}") for n in text_ids(self.tokenizer, text)}
        ids = [n for n in known if self.tokenizer.decode([n]).strip().upper() == letter]
        if not ids:
            message = f"expected a token for the letter {letter}, got none in the tokenizer"
            raise ConfigError(message, "unsupported", field="score")
        return ids

    def _asked(self, question: Question) -> str:
        return question.with_letters()


def _rows_with_images(batch: Batch) -> Batch:
    """Return a batch with one image for each row."""
    if batch.image_of_B is None:
        return batch
    of_B = batch.image_of_B
    has_image_B = batch.has_image_B
    return dataclasses.replace(
        batch,
        image_BCHW=batch.image_BCHW[of_B],
        has_image_B=None if has_image_B is None else has_image_B[of_B],
        image_of_B=None,
    )


def _collect(
    questions: Sequence[Question],
    row_Q: Sequence[int],
    texts: Sequence[str],
    sums: Sequence[float],
    tokens: Sequence[int],
) -> list[OptionScores]:
    """Return the scores of questions from those of their texts: means over an option's texts."""
    of_row: list[list[int]] = [[] for _ in questions]
    for place, row in enumerate(row_Q):
        of_row[row].append(place)
    collected = []
    for question, places in zip(questions, of_row, strict=True):
        per = len(places) // len(question.options)
        groups = [places[start : start + per] for start in range(0, len(places), per)]
        collected.append(
            OptionScores(
                [sum(sums[n] for n in group) / per for group in groups],
                [sum(tokens[n] for n in group) // per for group in groups],
                [sum(len(texts[n]) for n in group) // per for group in groups],
            )
        )
    return collected


def option_scorer(
    model: System, templates: Templates, protocol: VQAProtocol, score: Score = "auto"
) -> OptionScorer:
    """Return the scorer of a system.

    Args:
        model: the system.
        templates: templates of statements.
        protocol: rules by which options are compared with the answers of a model.
        score: kind of score; "auto" takes the first one that the system has.

    Raises ConfigError for a system without that score, EvaluationError for a fusion-encoder that
    was trained without matching.
    """
    check_choice(score, SCORES, "score")
    scorers: dict[str, OptionScorer] = {}
    model = as_matcher(model)
    if isinstance(model, FusionModel) and (model.can_match or not isinstance(model, DualEncoder)):
        scorers["matching"] = MatchingScorer(model, templates)
    if isinstance(model, DualEncoder):
        scorers["statement"] = SimilarityScorer(model, templates)
    if isinstance(model, VQA):
        scorers["answers"] = AnswerScorer(model, protocol)
    if isinstance(model, CausalLM):
        scorers["likelihood"] = PromptLikelihoodScorer(model, templates)
        scorers["letter"] = LetterScorer(model, templates)
    elif isinstance(model, ReportGenerator):
        scorers["likelihood"] = LikelihoodScorer(model, templates)
    if not scorers or score not in ("auto", *scorers):
        has = ", ".join(scorers) or "no score of options"
        message = f"{model.name} has {has}; expected {score}"
        raise ConfigError(message, "unsupported", field="score")
    return next(iter(scorers.values())) if score == "auto" else scorers[score]
