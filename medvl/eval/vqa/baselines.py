"""Baselines that do not use the image, reported next to every score."""

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
    """Return name -> predictions for the test questions, all fitted on the training questions alone.

    * always_yes, always_no, majority: one answer to all; majority is the most frequent one in train.
    * majority_by_kind: the most frequent one in train for the same answer type and question type.
    * question_lookup: the most frequent one in train for the identical question, else the majority.
    * question_only: a linear model of the question's words (`QuestionOnly`).

    Raises EvaluationError if train has no answer.
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
    default: str,
    key_of: Callable[[Question], Hashable],
) -> dict[str, Prediction]:
    """Return the most frequent answer of the training questions with the same key; ties in alphabetical order."""
    counts: dict[Hashable, Counter[str]] = {}
    for question in train:
        counts.setdefault(key_of(question), Counter())[protocol.normalize(question.answer)] += 1
    best = {key: min(answers, key=lambda answer: (-answers[answer], answer)) for key, answers in counts.items()}
    return {question.id: Prediction(best.get(key_of(question), default)) for question in test}


def _question_only(
    train: Sequence[Question], test: Sequence[Question], protocol: VQAProtocol, vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    index = vocabulary.index()
    classes = [index[protocol.normalize(question.answer)] for question in train]
    model = QuestionOnly([question.question for question in train], classes, len(vocabulary))
    scores_MV = model.scores([question.question for question in test])
    return predictions_from_scores([question.id for question in test], scores_MV, vocabulary)
