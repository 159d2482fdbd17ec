"""The evaluators' metrics as `torchmetrics.Metric` classes, for training loops of other libraries.

    metrics = LabelMetrics(["Edema", "Fracture"])
    metrics.update(scores_BL, labels_BL)         # in each validation step, on every rank
    metrics.compute()["auroc/macro"]             # over the items of all ranks

The states are the items themselves, gathered over ranks, because AUROC and recall are not means
over batches. Values equal those of `medvl eval`, without intervals. This module needs torchmetrics
(`medvl[metrics]`).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from medvl.errors import ConfigError, EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.metric_rows import (
    calibration_metrics,
    decision_metrics,
    measure,
    ranking_metrics,
)
from medvl.eval.core.metrics import check_scores
from medvl.eval.core.results import MetricRow
from medvl.eval.retrieval.image_text import (
    COMMONEST_TEXTS,
    Gallery,
    check_ks,
    rank_rows,
    retrieval_ranks,
)
from medvl.losses.pairs.blockwise import name_ids
from medvl.schema import Embeddings

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError as error:
    raise ConfigError(
        "torchmetrics is not installed: pip install 'medvl[metrics]'", "missing"
    ) from error


class LabelMetrics(Metric):
    """AUROC and average precision per label, "auroc/NAME", and their means, "auroc/macro".

    With `probabilities` also the Brier score and the calibration error, with `thresholds` also F1,
    MCC, accuracy, ... The values are those of `medvl eval classify` and `zero-shot`; a label
    without positives or negatives gives NaN and is left out of the means.
    """

    full_state_update = False

    def __init__(
        self,
        names: Sequence[str],
        *,
        policy: LabelPolicy | None = None,
        probabilities: bool = False,
        thresholds: Mapping[str, float] | None = None,
        **options: object,
    ) -> None:
        """Prepare the metrics.

        Args:
            names: labels, one for each column.
            policy: treatment of uncertain (-1) and missing (NaN) labels; that of the evaluators by
                default.
            probabilities: whether scores are probabilities.
            thresholds: label -> threshold, chosen on validation data
                (`medvl.eval.choose_threshold`); a label with NaN has no yes/no metrics.
            options: arguments of `torchmetrics.Metric`.
        """
        super().__init__(**options)
        if not names or len(set(names)) < len(names):
            raise EvaluationError(
                f"expected distinct names of labels, got {list(names)}", "conflict", field="names"
            )
        missing = [name for name in names if thresholds is not None and name not in thresholds]
        if missing:
            raise EvaluationError(
                f"no threshold for {', '.join(missing)}", "missing", field="thresholds"
            )
        self.names = tuple(names)
        self.policy = policy or LabelPolicy()
        self.probabilities = probabilities
        self.thresholds = {
            name: thresholds[name]
            for name in names
            if thresholds is not None and not math.isnan(thresholds[name])
        }
        self.scores: list[Tensor]
        self.labels: list[Tensor]
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, scores_BL: Tensor, labels_BL: Tensor) -> None:
        """Add a batch: scores, and labels that are 1, 0, -1 (uncertain) or NaN. Raises
        EvaluationError for shapes.
        """
        if scores_BL.shape != labels_BL.shape or scores_BL.shape[1:] != (len(self.names),):
            message = (
                f"expected (B, {len(self.names)}) twice, got {tuple(scores_BL.shape)} and "
                f"{tuple(labels_BL.shape)}"
            )
            raise EvaluationError(message, "mismatch", field="scores")
        self.scores.append(scores_BL.detach().double())
        self.labels.append(labels_BL.detach().double())

    def compute(self) -> dict[str, Tensor]:
        """Return name -> value over all items. Raises EvaluationError without an item, or for
        NaN scores.
        """
        _check_items(self.scores)
        scores, labels = (dim_zero_cat(state).cpu().numpy() for state in (self.scores, self.labels))
        scores_NL, labels_NL = check_scores(
            scores, self.policy.resolve(labels, self.names).labels_NL
        )
        means = {"macro": self.names}
        groups = [
            ranking_metrics(name, scores_NL, labels_NL, self.names, means=means)
            for name in ("auroc", "average_precision")
        ]
        if self.probabilities:
            groups.append(calibration_metrics(scores_NL, labels_NL, self.names))
        if self.thresholds:
            columns = [self.names.index(name) for name in self.thresholds]
            predicted_NL = scores_NL[:, columns] >= np.array(list(self.thresholds.values()))
            groups.append(
                decision_metrics(predicted_NL, labels_NL[:, columns], list(self.thresholds))
            )
        return _values(measure(groups, len(scores_NL), resamples=0))


class RetrievalMetrics(Metric):
    """Recall at k, median rank and MRR of images and texts, "recall@1/image_to_text", by the cosine
    of embeddings.

    The values are those of `medvl eval retrieval` for models that compare by the cosine: equal
    texts are one candidate, and images without text are left out.
    """

    full_state_update = False

    def __init__(self, ks: Sequence[int] = (1, 5, 10), **options: object) -> None:
        """Prepare the metrics; `options` are those of `torchmetrics.Metric`. Raises
        EvaluationError for k below 1.
        """
        super().__init__(**options)
        check_ks(ks)
        self.ks = tuple(ks)
        self.images: list[Tensor]
        self.texts: list[Tensor]
        self.text_ids: list[Tensor]
        for name in ("images", "texts", "text_ids"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, image_BE: Tensor, text_BE: Tensor, texts: Sequence[str]) -> None:
        """Add a batch of pairs; `texts` identify equal texts, also of other batches. Raises
        EvaluationError.
        """
        if image_BE.shape != text_BE.shape or len(texts) != len(image_BE) or image_BE.ndim != 2:
            message = (
                f"expected equal (B, E) and B texts, got {tuple(image_BE.shape)}, "
                f"{tuple(text_BE.shape)}, {len(texts)}"
            )
            raise EvaluationError(message, "mismatch", field="texts")
        collapsed = [" ".join(text.split()) for text in texts]
        kept = [row for row, text in enumerate(collapsed) if text]
        self.images.append(image_BE.detach()[kept].float())
        self.texts.append(text_BE.detach()[kept].float())
        self.text_ids.append(name_ids([collapsed[row] for row in kept]).to(image_BE.device))

    def compute(self) -> dict[str, Tensor]:
        """Return name -> value over all pairs. Raises EvaluationError for fewer than two
        distinct texts, or NaN.
        """
        _check_items(self.images)
        image_NE, text_NE, id_N = map(dim_zero_cat, (self.images, self.texts, self.text_ids))
        distinct_M, text_of_N = id_N.unique(return_inverse=True)
        if len(distinct_M) < 2:
            raise EvaluationError(
                f"expected two or more distinct texts, got {len(distinct_M)}", "empty"
            )
        first_M = torch.full_like(distinct_M, len(id_N)).scatter_reduce(
            0, text_of_N, torch.arange(len(id_N), device=id_N.device), "amin"
        )
        images, texts = (
            torch.nn.functional.normalize(each, dim=1) for each in (image_NE, text_NE[first_M])
        )
        text_of_N = text_of_N.cpu()
        ranks = retrieval_ranks(_Cosine(), Embeddings(images), Embeddings(texts), text_of_N)
        gallery = Gallery(
            keys=(), texts=(), text_of_N=text_of_N, index_N=torch.arange(len(id_N)), counts={}
        )
        rows = rank_rows(gallery, ranks, self.ks, resamples=0, seed=0)
        return _values([row for row in rows if row.target != COMMONEST_TEXTS])


class _Cosine:
    """Similarity of normalised embeddings."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """See `SupportsSimilarity`."""
        return images.global_NE @ texts.global_NE.T


def _check_items(state: object) -> None:
    if isinstance(state, list) and not state:
        raise EvaluationError("no item was added: call update first", "empty")


def _values(rows: Sequence[MetricRow]) -> dict[str, Tensor]:
    return {
        row.name: torch.tensor(math.nan if row.value is None else row.value, dtype=torch.float64)
        for row in rows
    }
