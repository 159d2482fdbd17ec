"""Predicted answers by question id, read from JSON lines or computed from scores over a
vocabulary.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from medvl.common.text_files import read_json_objects
from medvl.data.annotations import MIXED, Question, questions_of
from medvl.data.loading.studies import QuestionSource
from medvl.data.shards.format import MANIFEST
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import subgroups_of
from medvl.eval.vqa.protocol import PROTOCOL, AnswerVocabulary, VQAProtocol, get_protocol
from medvl.models.base import evaluating
from medvl.models.downstream.vqa.model import VQA, AnswerPredictions
from medvl.models.report_generators.causal_lm import CausalLM
from medvl.models.text_decoding import Decoding
from medvl.schema import Batch, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """An answer of a model."""

    answer: str
    answer_type: str | None = None
    """"closed" or "open", if the model predicts the type of the question."""
    score: float | None = None
    """Score of the answer, if there is one, for the page."""


Predictions = Mapping[str, Prediction]
"""Question id -> prediction."""


def read_predictions(path: str | Path) -> dict[str, Prediction]:
    """Read JSON lines with "id" and "answer", and optionally "answer_type" and "score".

    Raises:
        EvaluationError: the file does not exist, or a line is malformed or repeats an id; the
            message gives its number.
    """
    predictions: dict[str, Prediction] = {}
    fields = {"id": object, "answer": str}
    for where, row in read_json_objects(Path(path), EvaluationError, fields, field="predictions"):
        name = str(row["id"])
        score = row.get("score")
        if name in predictions:
            raise EvaluationError(
                f"{where}: question {name} has a second answer", "conflict", field="id"
            )
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise EvaluationError(f"{where}: score must be a number", "wrong_type", field="score")
        predictions[name] = Prediction(row["answer"], row.get("answer_type"), score)
    return predictions


def predictions_from_scores(
    ids: Sequence[str], scores_NV: ArrayLike, vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    """Return the answer with the highest score for each question; of ties, the first in the
    vocabulary.

    Raises EvaluationError if the shapes do not fit or a score is NaN.
    """
    scores = np.asarray(scores_NV, dtype=np.float64)
    if scores.shape != (len(ids), len(vocabulary)):
        message = (
            f"expected scores of shape {(len(ids), len(vocabulary))} (questions, "
            f"answers), got {scores.shape}"
        )
        raise EvaluationError(message, "mismatch")
    if np.isnan(scores).any():
        raise EvaluationError("a score is NaN: check the model's weights", "nonfinite")
    best_N = scores.argmax(axis=1)
    return {
        name: Prediction(vocabulary.answers[best], score=float(row_V[best]))
        for name, best, row_V in zip(ids, best_N.tolist(), scores, strict=True)
    }


def constant_predictions(ids: Iterable[str], answer: str) -> dict[str, Prediction]:
    """Return the same answer to every question."""
    return {name: Prediction(answer) for name in ids}


# The questions of an evaluation, with their splits and images.


@dataclasses.dataclass(frozen=True, slots=True)
class VQAData:
    """All questions of a corpus, in one of its definitions of splits."""

    name: str
    """Name of the corpus."""
    split_id: str
    """Name of the split definition: official, image-disjoint, ..."""
    questions: tuple[Question, ...]
    groups: tuple[str, ...]
    """Image (patient) of each question: the bootstrap unit."""
    subgroups: tuple[Mapping[str, str], ...] = ()
    """Attribute -> group of the image of each question; empty if unknown."""

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "VQAData":
        """Collect the questions of samples from a converter or from shards.

        `extra["split_id"]` of the samples names the split definition, for corpora with several.
        Raises EvaluationError if there are no questions, or two have the same id.
        """
        questions: list[Question] = []
        groups: list[str] = []
        subgroups: list[Mapping[str, str]] = []
        name = ""
        split_id = "official"
        for sample in samples:
            name = sample.corpus
            split_id = str(sample.extra.get("split_id", split_id))
            of_sample = questions_of(sample)
            questions += of_sample
            groups += [sample.patient] * len(of_sample)
            subgroups += [subgroups_of(sample)] * len(of_sample)
        if not questions:
            raise EvaluationError(
                "the samples have no `questions` in their extra: use shards of a VQA corpus",
                "empty",
            )
        if len({question.id for question in questions}) < len(questions):
            raise EvaluationError(
                f"{name}: several questions have the same id", "conflict", field="id"
            )
        return cls(name, split_id, tuple(questions), tuple(groups), tuple(subgroups))

    def part(self, *splits: str) -> "VQAData":
        """Return the questions of these splits. Raises EvaluationError if there are none."""
        kept = [index for index, question in enumerate(self.questions) if question.split in splits]
        if not kept:
            known = sorted({question.split for question in self.questions})
            message = (
                f"{self.name} has no question in {' or '.join(splits)}: its splits are "
                f"{', '.join(known)}"
            )
            raise EvaluationError(message, "empty", field="split")
        return self.choose(kept)

    def check_ids(self, predictions: Predictions) -> None:
        """Raise EvaluationError for predictions of other questions."""
        known = {question.id for question in self.questions}
        unknown = [name for name in predictions if name not in known]
        if unknown:
            message = (
                f"{len(unknown)} predictions have question ids that are not in {self.name}, "
                f"first {min(unknown)}"
            )
            raise EvaluationError(message, "mismatch")

    def choose(self, indices: Sequence[int]) -> "VQAData":
        """Return the questions at these indices."""
        return dataclasses.replace(
            self,
            questions=tuple(self.questions[index] for index in indices),
            groups=tuple(self.groups[index] for index in indices),
            subgroups=tuple(self.subgroups[index] for index in indices) if self.subgroups else (),
        )

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of questions, answers and splits, sorted by id: independent of the
        conversion.
        """
        rows = sorted(
            (question.as_json() for question in self.questions), key=lambda row: row["id"]
        )
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


# Answers of a model to the questions of a loader, and their accuracy during training.


class AnswerModel(Protocol):
    """A model that answers questions."""

    def predict(self, batch: Batch) -> AnswerPredictions:
        """Return an answer to each question of a batch, from a vocabulary or generated."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """Return all submodules, as in torch."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return all parameters, as in torch."""


class WrittenAnswers:
    """Answers that a causal language model writes behind the prompts of a batch, greedily."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.modules = model.modules
        self.parameters = model.parameters

    def predict(self, batch: Batch) -> AnswerPredictions:
        """Return an answer to each question of a batch, and its probability."""
        written = self.model.write_reports(batch, decoding=Decoding())
        answers = self.model.texts_of(written.ids_BT, written.mask_BT)
        return AnswerPredictions(answers, written.score_B.float().exp())


class QuestionLoader(Protocol):
    """Batches that hold every readable question of `source` exactly once."""

    @property
    def source(self) -> QuestionSource:
        """Source of the questions."""

    def __iter__(self) -> Iterator[Batch]: ...


def read_answer_vocabulary(folder: Path | str, protocol: str = PROTOCOL) -> AnswerVocabulary:
    """Build the answer vocabulary of a protocol from a folder of shards with training questions.

    Splits of the protocol that the folder lacks are read from the folders beside it that have their
    names. In a corpus that has all its splits in one folder there may be no validate split, as in
    VQA-RAD.

    Raises ShardError if a folder is damaged, and EvaluationError if a split of the protocol is in
    no folder, or the protocol has no vocabulary.
    """
    rules = get_protocol(protocol)
    source = ShardSource(folder)
    data = question_data([source])
    missing = set(rules.vocabulary) - {question.split for question in data.questions}
    if source.manifest.split == MIXED:
        missing -= {"validate"}
    others = [
        path
        for split in sorted(missing)
        if ((path := source.folder.parent / split) / MANIFEST).is_file()
    ]
    if absent := sorted(missing - {path.name for path in others}):
        message = (
            f"protocol {rules.name} takes answers of {', '.join(absent)} too, and "
            f"{source.folder} has none"
        )
        advice = (
            f"add the shards of these splits as folders of {source.folder.parent}, or "
            f"choose protocol {PROTOCOL}"
        )
        raise EvaluationError(f"{message}; {advice}", "missing", field="protocol")
    if others:
        data = question_data([source, *map(ShardSource, others)])
    return AnswerVocabulary.build(data.questions, rules)


def read_answered(folder: Path | str, normalize: Callable[[str], str]) -> list[tuple[str, str]]:
    """Return the training questions of a folder of shards that have an answer, with their
    normalised answers.

    Raises ShardError if the folder is damaged, EvaluationError if it has no training question.
    """
    pairs = [
        (question.question, normalize(question.answer))
        for question in question_data([ShardSource(folder)]).part("train").questions
    ]
    return [pair for pair in pairs if pair[1]]


def model_vocabulary(model: VQA, protocol: VQAProtocol) -> AnswerVocabulary | None:
    """Return the answers that a model can give, as the protocol compares them; None if it
    generates them.
    """
    return (
        None
        if model.config.head == "generation"
        else AnswerVocabulary.of_model(model.config.answers, protocol)
    )


def questions_beside(folders: Sequence[Path]) -> list[Question]:
    """Return the questions of the splits of a corpus in the folders beside some of its folders,
    without theirs. Two conversions of one release give a question twice.
    """
    own = {folder.resolve() for folder in folders}
    beside = {
        path.parent.resolve() for folder in folders for path in folder.parent.glob(f"*/{MANIFEST}")
    }
    corpora = {ShardSource(folder).manifest.corpus for folder in folders}
    sources = [ShardSource(folder) for folder in sorted(beside - own)]
    others = [source for source in sources if source.manifest.corpus in corpora]
    return [
        question
        for source in others
        for position in range(len(source))
        for question in questions_of(source.sample(position))
    ]


def question_data(sources: Iterable[ShardSource]) -> VQAData:
    """Return all questions of folders of one corpus. Raises EvaluationError if there are none."""
    return VQAData.from_samples(
        source.sample(index) for source in sources for index in range(len(source))
    )


def answer_questions(model: AnswerModel, loader: QuestionLoader) -> dict[str, Prediction]:
    """Return question id -> the model's answer, with a score between 0 and 1.

    A question whose image cannot be read has no prediction, and counts as wrong. Raises
    EvaluationError if a score is NaN.
    """
    ids = {
        loader.source.key(n): entry.question.id for n, entry in enumerate(loader.source.questions)
    }
    device = next(model.parameters()).device
    predictions: dict[str, Prediction] = {}
    with evaluating(model):
        for batch in loader:
            output = model.predict(batch.to(device))
            if output.score_B.isnan().any():
                raise EvaluationError("a score is NaN: check the model's weights", "nonfinite")
            rows = zip(batch.keys, output.answers, output.score_B.tolist(), strict=True)
            predictions |= {
                ids[key]: Prediction(answer, score=score) for key, answer, score in rows
            }
    return predictions


class AnswerEval:
    """Accuracy during training: `AnswerEval(loader)(model)` returns a flat mapping of metrics
    without intervals.

    Its keys are "vqa/accuracy" over all questions of the loader, and "vqa/closed" and "vqa/open" if
    there are such. A question whose answer is not in the vocabulary is wrong, unless the model
    generates that answer.

    Raises EvaluationError for a protocol that needs predicted answer types.
    """

    def __init__(self, loader: QuestionLoader, protocol: str = PROTOCOL) -> None:
        self.loader = loader
        self.protocol = get_protocol(protocol)
        self.protocol.check_answer_types()

    def __call__(self, model: AnswerModel) -> Mapping[str, float]:
        """Return the metrics of the model."""
        predictions = answer_questions(model, self.loader)
        questions = [entry.question for entry in self.loader.source.questions]
        answers = {name: prediction.answer for name, prediction in predictions.items()}
        credit_N = self.protocol.credits(questions, answers)
        closed_N = self.protocol.closed_questions(questions, {})
        parts = {"accuracy": np.ones_like(closed_N), "closed": closed_N, "open": ~closed_N}
        return {
            f"vqa/{name}": float(credit_N[part].mean())
            for name, part in parts.items()
            if part.any()
        }


# Baselines that do not use the image, reported next to every score.

# Question-only baseline: a classifier without the image, which measures how much a dataset
# reveals by its wording.
#
# Ridge regression onto one-hot answers from counts of words and word pairs, solved exactly in
# dual form. Equal questions are merged into one weighted row, which gives the same solution with
# a smaller system.
#
# Shape letters: N training questions, U unique ones, F features, V answers of the vocabulary, M
# questions to answer.

_WORD = re.compile(r"\w+")
_BLOCK = 512  # questions per dense block


def features_of(question: str) -> Counter[str]:
    """Return counts of words and of pairs of adjacent words."""
    words = _WORD.findall(question.lower())
    return Counter([*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))])


class QuestionOnly:
    """Scores of all answers, linear in the words of the question.

    Minimizes sum_n |W' x_n + b - y_n|^2 + penalty |W|^2 over W (F, V) and b (V), with one-hot y_n.
    With centered X, W = X' A and (X X' + penalty C^-1) A = mean of y for each unique question,
    where C holds the questions' counts.

    Args:
        questions: N training questions.
        answers: index of the answer of each question in the vocabulary.
        classes: size of the vocabulary, V.
        penalty: strength of the regularization.

    Raises EvaluationError if there are no questions, or an index is outside of the vocabulary.
    """

    def __init__(
        self,
        questions: Sequence[str],
        answers: Sequence[int],
        classes: int,
        *,
        penalty: float = 1.0,
    ) -> None:
        if (
            not questions
            or len(questions) != len(answers)
            or not 0 <= min(answers) <= max(answers) < classes
        ):
            message = "a question-only model needs questions, each with an answer of the vocabulary"
            raise EvaluationError(message, "mismatch")
        row_of: dict[str, int] = {}
        rows_N = torch.tensor([row_of.setdefault(question, len(row_of)) for question in questions])
        self._index = {
            name: i
            for i, name in enumerate(sorted({f for text in row_of for f in features_of(text)}))
        }
        self._unique_UF = self._matrix(list(row_of))
        count_U = torch.bincount(rows_N).double()
        target_UV = torch.zeros(len(row_of), classes, dtype=torch.float64)
        target_UV.index_put_(
            (rows_N, torch.tensor(answers)), torch.ones(1, dtype=torch.float64), accumulate=True
        )
        self._bias_V = target_UV.sum(dim=0) / len(questions)
        target_UV = target_UV / count_U[:, None] - self._bias_V
        self._mean_F = torch.mv(self._unique_UF.t(), count_U) / len(questions)
        gram_UU = self._centred_products(self._unique_UF)
        gram_UU.diagonal().add_(penalty / count_U)
        self._dual_UV = torch.cholesky_solve(target_UV, torch.linalg.cholesky(gram_UU))

    def scores(self, questions: Sequence[str]) -> NDArray[np.float64]:
        """Return scores_MV; words that are not in the training questions are ignored."""
        row_of: dict[str, int] = {}
        rows_M = [row_of.setdefault(question, len(row_of)) for question in questions]
        products_QU = self._centred_products(self._matrix(list(row_of)))
        return (products_QU @ self._dual_UV + self._bias_V).numpy()[rows_M]

    def _centred_products(self, other_QF: Tensor) -> Tensor:
        """Return (x - mean) . (u - mean) for the rows x of a matrix and every unique training
        question u: (Q, U).
        """
        blocks = []
        for start in range(0, max(1, other_QF.shape[0]), _BLOCK):
            rows = torch.arange(start, min(start + _BLOCK, other_QF.shape[0]))
            dense_FQ = (other_QF.index_select(0, rows).to_dense() - self._mean_F).T
            products_UQ = torch.sparse.mm(self._unique_UF, dense_FQ) - self._mean_F @ dense_FQ
            blocks.append(products_UQ.T)
        return torch.cat(blocks)

    def _matrix(self, questions: Sequence[str]) -> Tensor:
        entries = [
            (row, self._index[name], count)
            for row, question in enumerate(questions)
            for name, count in features_of(question).items()
            if name in self._index
        ]
        index_2E = (
            torch.tensor([entry[:2] for entry in entries], dtype=torch.int64).reshape(-1, 2).T
        )
        values_E = torch.tensor([entry[2] for entry in entries], dtype=torch.float64)
        size = (len(questions), len(self._index))
        return torch.sparse_coo_tensor(index_2E, values_E, size, check_invariants=True).coalesce()


QUESTION_ONLY = "question_only"


def baselines(
    train: Sequence[Question], test: Sequence[Question], protocol: VQAProtocol
) -> dict[str, dict[str, Prediction]]:
    """Return name -> predictions for the test questions, all fitted on the training questions
    alone.

    * always_yes, always_no, majority: one answer to all; majority is the most frequent one in
      train.
    * majority_by_kind: the most frequent one in train for the same answer type and question type.
    * question_lookup: the most frequent one in train for the identical question, else the majority.
    * question_only: a linear model of the question's words (`QuestionOnly`).

    Raises EvaluationError if train has no answer.
    """
    vocabulary = AnswerVocabulary.build(
        train, VQAProtocol(name=protocol.name, normalizer=protocol.normalizer)
    )
    pairs = [(question, protocol.normalize(question.answer)) for question in train]
    answered = [(question, answer) for question, answer in pairs if answer]
    ids = [question.id for question in test]
    majority = vocabulary.answers[0]
    return {
        "always_yes": constant_predictions(ids, "yes"),
        "always_no": constant_predictions(ids, "no"),
        "majority": constant_predictions(ids, majority),
        "majority_by_kind": _by_key(answered, test, majority, lambda q: (q.answer_type, q.kind)),
        "question_lookup": _by_key(
            answered, test, majority, lambda q: " ".join(q.question.lower().split())
        ),
        QUESTION_ONLY: _question_only(answered, test, vocabulary),
    }


_Answered = Sequence[tuple[Question, str]]
"""Training questions with their normalized answers."""


def _by_key(
    train: _Answered,
    test: Sequence[Question],
    default: str,
    key_of: Callable[[Question], Hashable],
) -> dict[str, Prediction]:
    """Return the most frequent answer of the training questions with the same key; ties in
    alphabetical order.
    """
    counts: dict[Hashable, Counter[str]] = {}
    for question, answer in train:
        counts.setdefault(key_of(question), Counter())[answer] += 1
    best = {
        key: min(answers, key=lambda answer: (-answers[answer], answer))
        for key, answers in counts.items()
    }
    return {question.id: Prediction(best.get(key_of(question), default)) for question in test}


def _question_only(
    train: _Answered, test: Sequence[Question], vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    index = vocabulary.index()
    classes = [index[answer] for _, answer in train]
    model = QuestionOnly([question.question for question, _ in train], classes, len(vocabulary))
    scores_MV = model.scores([question.question for question in test])
    return predictions_from_scores([question.id for question in test], scores_MV, vocabulary)
