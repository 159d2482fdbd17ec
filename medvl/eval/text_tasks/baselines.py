"""Baselines of text tasks that need no encoder.

* "dictionary": the longest match of mentions in the training data (entities), or the most frequent tag of each word.
* "constant": the most frequent class of the training data (the yes of PubMedQA).
* "bag of words": logistic regression on the presence of the 2,000 most frequent words, one for each class.
* "word overlap": the words that two sentences share, as a part of all of theirs.
"""

import collections
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from medvl.data.text_tasks.tasks import TextExample, TextTask
from medvl.eval.probing.solver import comparable_probabilities, fit_logistic
from medvl.eval.text_tasks.metrics import Predicted, entity_spans

_WORD = re.compile(r"\w+|[@$]\w+[$]?")
_VOCABULARY, _PENALTY = 2000, 1e-3


def baselines(task: TextTask, train: Sequence[TextExample], test: Sequence[TextExample]) -> Mapping[str, Predicted]:
    """Return the predictions of each baseline that fits the task, by name."""
    match task.kind:
        case "entities":
            return {"dictionary": _dictionary(train, test)}
        case "words":
            return {"dictionary": _frequent_tags(train, test)}
        case "similarity":
            return {"word overlap": [_overlap(*example.texts) for example in test]}
        case "documents":
            return {"bag of words": _bag_of_words(task, train, test)}
        case "relations" | "answers":
            constant, _ = collections.Counter(str(example.label) for example in train).most_common(1)[0]
            if task.kind == "relations":  # the most frequent relation: "no relation" scores 0
                names = collections.Counter(str(e.label) for e in train if e.label != task.negative)
                constant = names.most_common(1)[0][0] if names else constant
            return {"constant": [constant] * len(test), "bag of words": _bag_of_words(task, train, test)}


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def _dictionary(train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    mentions = {
        tuple(word.lower() for word in example.texts[start:end])
        for example in train
        for start, end in entity_spans(example.label if isinstance(example.label, tuple) else ())
    }
    longest = max(map(len, mentions), default=0)
    return [_matched(tuple(word.lower() for word in example.texts), mentions, longest) for example in test]


def _matched(words: tuple[str, ...], mentions: set[tuple[str, ...]], longest: int) -> tuple[str, ...]:
    tags, place = ["O"] * len(words), 0
    while place < len(words):
        lengths = range(min(longest, len(words) - place), 0, -1)
        length = next((n for n in lengths if words[place : place + n] in mentions), 0)
        if length:
            tags[place : place + length] = ["B", *["I"] * (length - 1)]
        place += max(length, 1)
    return tuple(tags)


def _frequent_tags(train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for example in train:
        for word, tag in zip(example.texts, example.label if isinstance(example.label, tuple) else (), strict=True):
            counts[word.lower()][tag] += 1
    tag_of = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    return [tuple(tag_of.get(word.lower(), "O") for word in example.texts) for example in test]


def _overlap(first: str, second: str) -> float:
    a, b = set(words_of(first)), set(words_of(second))
    return len(a & b) / max(len(a | b), 1)


def _bag_of_words(task: TextTask, train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    counts = collections.Counter(word for example in train for word in set(words_of(" ".join(example.texts))))
    index = {word: number for number, (word, _) in enumerate(counts.most_common(_VOCABULARY))}
    labels = [example.label if isinstance(example.label, tuple) else (example.label,) for example in train]
    y_NL = np.array([[float(name in of_example) for name in task.labels] for of_example in labels])
    probe = fit_logistic(_presence(train, index), y_NL, _PENALTY)
    scores_NL = comparable_probabilities(probe, _presence(test, index), y_NL)
    if task.kind == "documents":
        return [tuple(name for name, p in zip(task.labels, row, strict=True) if p > 0.5) for row in scores_NL]
    return [task.labels[int(row.argmax())] for row in scores_NL]


def _presence(examples: Sequence[TextExample], index: Mapping[str, int]) -> torch.Tensor:
    x_ND = torch.zeros(len(examples), len(index), dtype=torch.float64)
    for row, example in enumerate(examples):
        columns = {index[word] for word in words_of(" ".join(example.texts)) if word in index}
        x_ND[row, list(columns)] = 1
    return x_ND
