"""Scores of change from a linear probe, cross-validated over patients: MS-CXR-T has labels of test images only.

Shape letters: N images, D feature dim, L findings, C classes of change, K = L x C.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array
from medvl.eval.probing.evaluate import choose_probe
from medvl.eval.probing.solver import Standardizer, comparable_probabilities
from medvl.schema import CHANGES


def cross_validated_scores(
    vector_ND: Tensor, truth_NL: NDArray[np.int64], patients: Sequence[str], *, folds: int, seed: int
) -> Array:
    """Return (N, L, C): probabilities of each class, by probes that have not seen the patient.

    One logistic regression per finding and class, against the other classes. To score a fold, probes with several
    penalties are fitted to all folds but this and the next one, which chooses the penalty by its mean AUROC.

    Args:
        vector_ND: features of the images, from pairs of images where the model takes them.
        truth_NL: index of the class in `CHANGES`; -1 without a label.
        patients: patient of each image; a patient's images are in one fold.
        folds: number of folds, at least 3.
        seed: seed of the assignment of patients to folds.

    Raises EvaluationError for fewer than 3 folds, or fewer patients than folds.
    """
    names, patient_N = np.unique(np.asarray(patients), return_inverse=True)
    if not 3 <= folds <= len(names):
        message = f"expected from 3 folds to as many as there are patients ({len(names)}), got {folds}"
        raise EvaluationError(message, "out_of_range", field="folds")
    fold_N = (np.random.default_rng(seed).permutation(len(names)) % folds)[patient_N]
    truth_NL1 = truth_NL[:, :, None]
    class_NLC = np.where(truth_NL1 >= 0, truth_NL1 == np.arange(len(CHANGES)), np.nan)
    y_NK = class_NLC.reshape(len(truth_NL), -1)
    scores_NK = np.zeros_like(y_NK)
    for fold in range(folds):
        test_N, valid_N = fold_N == fold, fold_N == (fold + 1) % folds
        train_N = ~(test_N | valid_N)
        standardize = Standardizer.fit(vector_ND[train_N])
        train_x, valid_x, test_x = (standardize(vector_ND[rows_N]) for rows_N in (train_N, valid_N, test_N))
        probe = choose_probe(train_x, y_NK[train_N], valid_x, y_NK[valid_N]).probe
        scores_NK[test_N] = comparable_probabilities(probe, test_x, y_NK[train_N])
    return scores_NK.reshape(class_NLC.shape)
