"""The one of several texts about an image that speaks for all.

The likeliest text of a writer is mostly the plainest: "no abnormality" is said in few ways and each finding in many, so
that a search prefers it where the writer itself thinks a finding likelier. Draws do not; of these, the one is taken
whose findings agree best with those of all others: minimum Bayes risk (Kumar and Byrne, NAACL 2004) with the F1 of
findings for its utility.
"""

from collections.abc import Sequence

import numpy as np

from medvl.data.reports.labeler import label_report
from medvl.eval.report_generation.clinical_f1 import Doubt, asserted


def mbr_select(texts: Sequence[str], doubt: Doubt = "negative") -> int:
    """Which of the texts has the greatest mean F1, over all of them, of the findings that it asserts; the first of
    equals. Two texts without any finding agree. Raises ValueError when there is no text."""
    if not texts:
        raise ValueError("there is no text to choose")
    said_SL = asserted([label_report(text) for text in texts], doubt).astype(float)
    both_SS = said_SL @ said_SL.T
    either_SS = said_SL.sum(axis=1)[:, None] + said_SL.sum(axis=1)
    agree_SS = np.where(either_SS > 0, 2 * both_SS / np.maximum(either_SS, 1), 1.0)
    return int(agree_SS.mean(axis=1).argmax())
