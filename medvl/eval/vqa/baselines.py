"""Answers that take no image: what every reported score stands beside."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from medvl.data.annotations.questions import Question
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary
from medvl.eval.vqa.predictions import Prediction, constant_predictions, predictions_from_scores
from medvl.eval.vqa.protocol import VQAProtocol
from medvl.eval.vqa.question_only_baseline import QuestionOnly

QUESTION_ONLY = "question_only"


def baselines(
    train: Sequence[Question], test: Sequence[Question], protocol: VQAProtocol
) -> dict[str, dict[str, Prediction]]:
    """Name -> predictions for the test questions, all learnt from the training questions alone.

    * always_yes, always_no, majority: one answer to all; majority is the most frequent one in train.
    * majority_by_kind: the most frequent one in train for the same answer type and question type.
    * question_lookup: the most frequent one in train for the same question, word for word, else the majority.
    * question_only: a linear model of the question's words (`QuestionOnly`).

    Raises EvaluationError when train has no answer.
    """
    vocabulary = AnswerVocabulary.build(train, VQAProtocol(name=protocol.name, normalizer=protocol.normalizer))
    answered = [question for question in train if protocol.normalize(question.answer)]
    ids = [question.id for question in test]
    majority = vocabulary.answers[0]
    return {
        "always_yes": constant_predictions(ids, "yes"),
        "always_no": constant_predictions(ids, "no"),
        "majority": constant_predictions(ids, majority),
        "majority_by_kind": _by_key(answered, test, protocol, majority, lambda q: (q.answer_type, q.kind)),
        "question_lookup": _by_key(answered, test, protocol, majority, lambda q: " ".join(q.question.lower().split())),
        QUESTION_ONLY: _question_only(answered, test, protocol, vocabulary),
    }


def _by_key(
    train: Sequence[Question],
    test: Sequence[Question],
    protocol: VQAProtocol,
    otherwise: str,
    key_of: Callable[[Question], Hashable],
) -> dict[str, Prediction]:
    """The most frequent answer of the training questions with the same key; of equal ones the first in the alphabet."""
    counts: dict[Hashable, Counter[str]] = {}
    for question in train:
        counts.setdefault(key_of(question), Counter())[protocol.normalize(question.answer)] += 1
    best = {key: min(found, key=lambda answer: (-found[answer], answer)) for key, found in counts.items()}
    return {question.id: Prediction(best.get(key_of(question), otherwise)) for question in test}


def _question_only(
    train: Sequence[Question], test: Sequence[Question], protocol: VQAProtocol, vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    index = vocabulary.index()
    classes = [index[protocol.normalize(question.answer)] for question in train]
    model = QuestionOnly([question.question for question in train], classes, len(vocabulary))
    scores_MV = model.scores([question.question for question in test])
    return predictions_from_scores([question.id for question in test], scores_MV, vocabulary)
