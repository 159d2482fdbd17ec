"""Minimum-Bayes-risk selection among sampled reports.

The likeliest report of a model is often a normal one, because "no abnormality" has few paraphrases and each finding has
many: beam search then prefers it even if the model gives a finding a higher total probability. Samples do not have this
bias. Of several, the one is selected whose findings agree best with those of all others: minimum Bayes risk (Kumar and
Byrne, NAACL 2004) with the F1 of findings as utility. The labeler that selects is the
one that reads the findings of clinical F1: see these figures beside those of greedy search, and against labels.
"""

from collections.abc import Sequence

import numpy as np

from medvl.data.reports.labeler import conventions_named, label_report
from medvl.errors import EvaluationError
from medvl.eval.report_generation.clinical_f1 import Uncertain, positive_findings
from medvl.schema import ConventionsName


def mbr_select(
    texts: Sequence[str], uncertain: Uncertain = "negative", *, conventions: ConventionsName = "chexpert"
) -> int:
    """Return the index of the text with the highest mean F1 of findings over all texts; the first one of ties.

    Two texts without findings have an F1 of 1. Raises ValueError if there is no text,
    EvaluationError for unknown conventions.
    """
    if not texts:
        raise ValueError("expected one or more texts, got none")
    rules = conventions_named(conventions, error=EvaluationError)
    positive_SL = positive_findings([label_report(text, rules) for text in texts], uncertain).astype(float)
    both_SS = positive_SL @ positive_SL.T
    total_SS = positive_SL.sum(axis=1)[:, None] + positive_SL.sum(axis=1)
    f1_SS = np.where(total_SS > 0, 2 * both_SS / np.maximum(total_SS, 1), 1.0)
    return int(f1_SS.mean(axis=1).argmax())
