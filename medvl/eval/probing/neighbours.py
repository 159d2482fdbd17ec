"""Neighbours, prototypes and few labels on the features of a frozen image encoder.

Protocol "neighbours", version 1:

* Features are those of the linear probe, minus their mean over the training images, L2-normalised
  (Wang et al. 2019, arXiv 1911.04623, "CL2N"). Labels, splits and intervals are as in the protocol
  "linear_probe".
* "auroc@knn": the score of a finding is the share of positives among the k most similar training
  images of known label, weighted by exp(cosine / 0.07) (Wu et al. 2018, arXiv 1805.01978). k is
  one for all findings: the one of a fixed list with the best mean AUROC on the validation images.
* "auroc@prototypes": the cosine to the mean of the positive training images minus that to the mean
  of the negative ones, which are normalised again.
* "auroc@4-shot": the same with the means of 4 positive and 4 negative images for each finding, of
  different patients, or all if there are fewer. It is the mean over the seeds, and
  "auroc_sd@4-shot" the standard deviation. The images of one seed are nested.
* "auroc@linear": the linear probe on all labels, the "auroc@100%" of `medvl eval probe`.
* Rows without a suffix are those of the neighbours: calibration, yes/no metrics at thresholds
  chosen on validation images, subgroups.
* A label with only positives or only negatives is scored the same for all images.

Shape letters: N training images, M other images, L labels, D feature dim, K neighbours.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.classification import scored_images as scoring
from medvl.eval.classification.evaluation import LIMITS, facts, sections, subtitle
from medvl.eval.classification.scored_images import (
    ClassificationResult,
    LabelPolicy,
    MeanOptions,
    ThresholdRule,
)
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import OutputOptions, Setup
from medvl.eval.core.results import (
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    ScoredClasses,
    classes_of_lines,
    format_table,
)
from medvl.eval.evaluation import MEAN, Column, Evaluation, Outcome, Task, Trial
from medvl.eval.html.page import Page, Pixels, headline, write_page
from medvl.eval.probing.evaluation import (
    ENCODERS,
    EncoderOptions,
    inputs_of,
    open_features,
    summary_table,
)
from medvl.eval.probing.features import FeatureTable, Standardizer
from medvl.eval.probing.protocol import (
    choose_probe,
    fingerprints,
    labelled_images,
    mean_auroc,
    over_runs,
)
from medvl.eval.registry import register_evaluation

PROTOCOL = "neighbours"
PROTOCOL_VERSION = 1
COUNTS = (1, 5, 10, 20, 50, 100, 200)
"""Candidates of k."""
TEMPERATURE = 0.07
_CHUNK = 128
_TRIAL_SHOTS = 4
"""Images of a class in `medvl benchmark`."""
_TITLES = {"@knn": "neighbours", "@prototypes": "prototypes", "@linear": "linear probe"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NeighboursResult(ClassificationResult):
    """Results of all methods; images, scores and thresholds are of the neighbours."""

    columns: Mapping[str, str]
    """Suffix of the metrics -> method."""
    further: Mapping[str, Sequence[Array]]
    """Suffix of the metrics -> scores (M, L) of each draw, of the methods beside the neighbours."""

    def table(self) -> str:
        """Return the AUROC of every label by method as plain text."""
        metrics = [f"auroc{ending}" for ending in self.columns]
        table = format_table([row for row in self.results.rows if row.metric in metrics])
        return "\n\n".join([table, *scoring.notes_on_means(self.results.details)])

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the neighbours, with `further`: suffix -> scores by label of each
        draw.
        """
        names = self.images.names
        tables = {ending: np.stack(runs, axis=1) for ending, runs in self.further.items()}
        for number, line in enumerate(ClassificationResult.predictions(self)):
            further = {
                ending: [
                    dict(zip(names, scores_L, strict=True)) for scores_L in table[number].tolist()
                ]
                for ending, table in tables.items()
            }
            yield {**line, "further": further}


def evaluate_neighbours(
    train: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    *,
    counts: Sequence[int] = COUNTS,
    shots: Sequence[int] = (1, 4, 16),
    seeds: int = 5,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    smallest_class: int = 1,
    inputs: Mapping[str, str | None] | None = None,
) -> NeighboursResult:
    """Evaluate neighbours, prototypes and few labels by the protocol of this module.

    Args:
        train, valid, test: features of one encoder for different patients.
        counts: candidates of k.
        shots: numbers of positive, and of negative, images of a finding.
        seeds: random draws of these images.
        policy, threshold_rule, resamples, seed, smallest_subgroup, smallest_class, inputs: as in
            `linear_probe`.

    Raises:
        EvaluationError: no label can be evaluated, or counts, shots or seeds are below 1.
        SplitError: two of the sets share a patient, or validation or test images are synthetic.
    """
    _check_positive(counts=counts or [0], shots=shots or [1], seeds=[seeds])
    policy = policy or LabelPolicy()
    images = labelled_images(train, valid, test, policy, user="medvl eval neighbours")
    y_NL = images["train"].labels_NL
    mean_D = train.x_ND.mean(dim=0)
    train_ND, valid_MD, test_MD = (
        F.normalize(table.x_ND - mean_D, dim=1) for table in (train, valid, test)
    )
    on_valid = knn_scores(valid_MD, train_ND, y_NL, counts)
    auroc = {k: mean_auroc(on_valid[k], images["valid"].labels_NL) for k in sorted(counts)}
    k = max(auroc, key=auroc.__getitem__)
    on_test_ML = knn_scores(test_MD, train_ND, y_NL, [k])[k]
    few = {
        f"@{count}-shot": [
            few_labels(y_NL, images["test"].names, train.patients, count, number)
            for number in range(seeds)
        ]
        for count in sorted(shots)
    }
    scores = {
        ending: [prototype_scores(test_MD, train_ND, labels_NL) for labels_NL in runs]
        for ending, runs in {"@prototypes": [y_NL], **few}.items()
    }
    standardize = Standardizer.fit(train.x_ND)
    probe = choose_probe(
        standardize(train.x_ND), y_NL, standardize(valid.x_ND), images["valid"].labels_NL
    )
    linear_ML = probe.probe.probability_NL(standardize(test.x_ND))
    scores = {"@knn": [on_test_ML], **scores, "@linear": [linear_ML]}
    scored = dataclasses.replace(
        images["test"], scores_NL=on_test_ML, smallest_class=smallest_class
    )
    thresholds = scoring.choose_thresholds(
        dataclasses.replace(images["valid"], scores_NL=on_valid[k]), scored, threshold_rule
    )
    results = scoring.evaluate_scores(
        scored,
        [
            *scoring.ranking_groups(scored),
            *scoring.decision_groups(scored, thresholds, probabilities=True),
            *(
                over_runs(metric, runs, scored.labels_NL, scored.names, ending, means=scored.means)
                for ending, runs in scores.items()
                for metric in ("auroc", "average_precision")
            ),
        ],
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config={
            "counts": sorted(counts),
            "shots": sorted(shots),
            "seeds": seeds,
            "temperature": TEMPERATURE,
            "policy": dataclasses.asdict(policy),
            "threshold_rule": threshold_rule,
            "bootstrap_unit": "patient",
            "resamples": resamples,
            "seed": seed,
            "smallest_subgroup": smallest_subgroup,
        },
        inputs={**fingerprints(train, valid, test), **(inputs or {})},
        details={
            "k": k,
            "validation_auroc": {str(count): value for count, value in auroc.items()},
            "penalty": probe.penalty,
            "feature_dim": train.x_ND.shape[1],
            **({"note": train.note} if train.note else {}),
        },
    )
    columns = {ending: _TITLES.get(ending, ending.removeprefix("@")) for ending in scores}
    del scores["@knn"]  # they are those of `scored`
    return NeighboursResult(
        results=results, images=scored, thresholds=thresholds, columns=columns, further=scores
    )


def _check_positive(**settings: Sequence[int]) -> None:
    for field, values in settings.items():
        if min(values) < 1:
            message = f"expected {field} of 1 or more, got {list(values)}"
            raise EvaluationError(message, "out_of_range", field=field)


# The methods, on L2-normalised features.


def knn_scores(
    x_MD: Tensor, train_ND: Tensor, y_NL: Array, counts: Sequence[int]
) -> dict[int, Array]:
    """Return k -> the weighted share of positives among the k nearest training images, (M, L).

    Args:
        x_MD: features of the scored images.
        train_ND: features of the training images.
        y_NL: labels of the training images: 1, 0 or NaN, whose images are no neighbours for that
            label. A label that no image has is scored 0.5.
        counts: values of k; all images if there are fewer.
    """
    scores = {count: np.full((len(x_MD), y_NL.shape[1]), 0.5) for count in counts}
    # Labels that are known for the same images have the same neighbours.
    patterns_NG, group_L = np.unique(~np.isnan(y_NL), axis=1, return_inverse=True)
    for group, known_N in enumerate(patterns_NG.T):
        if not known_N.any():
            continue
        columns = np.flatnonzero(group_L.reshape(-1) == group)
        known_ND = train_ND[torch.from_numpy(known_N)]
        positive_NL = torch.from_numpy(y_NL[np.ix_(known_N, columns)])
        largest = min(max(counts), len(known_ND))
        for start in range(0, len(x_MD), _CHUNK):
            cosine_MN = x_MD[start : start + _CHUNK] @ known_ND.T
            cosine_MK, nearest_MK = cosine_MN.topk(largest, dim=1)
            nearest_first_MK = cosine_MK.double() - cosine_MK[:, :1]  # exp() cannot overflow
            weight_MK = torch.exp(nearest_first_MK / TEMPERATURE)
            total_MK = weight_MK.cumsum(dim=1)
            positive_MKL = (weight_MK[:, :, None] * positive_NL[nearest_MK]).cumsum(dim=1)
            for count in counts:
                last = min(count, largest) - 1
                share_ML = positive_MKL[:, last] / total_MK[:, last, None]
                scores[count][start : start + _CHUNK, columns] = share_ML.numpy()
    return scores


def prototype_scores(x_MD: Tensor, train_ND: Tensor, y_NL: Array) -> Array:
    """Return the cosine to the mean of the positives minus that to the mean of the negatives,
    (M, L).

    Arguments are as in `knn_scores`. A label with one class only is scored 0.
    """
    scores_ML = np.zeros((len(x_MD), y_NL.shape[1]))
    for column, label_N in enumerate(y_NL.T):
        of_class = [train_ND[torch.from_numpy(label_N == value)] for value in (1, 0)]
        if all(map(len, of_class)):
            means_2D = F.normalize(torch.stack([each.mean(dim=0) for each in of_class]), dim=1)
            positive_M, negative_M = (x_MD @ means_2D.T).T
            scores_ML[:, column] = (positive_M - negative_M).numpy()
    return scores_ML


def few_labels(
    y_NL: Array, names: Sequence[str], patients: Sequence[str], count: int, seed: int
) -> Array:
    """Return the labels of `count` positive and `count` negative images of each finding, NaN for
    all other images.

    The images of a class are of different patients. Those of a smaller count are among those of a
    larger one.

    Args:
        y_NL: labels of 1, 0 or NaN.
        names: finding of each column, from which its draw is derived.
        patients: patient of each image.
        count: images of each class; all patients if there are fewer.
        seed: seed of the draw.
    """
    few_NL = np.full_like(y_NL, np.nan)
    for column, name in enumerate(names):
        rng = np.random.default_rng([seed, *name.encode()])
        for value in (1, 0):
            order = rng.permutation(np.flatnonzero(y_NL[:, column] == value))
            first_of_patient: dict[str, int] = {}
            for row in order.tolist():
                first_of_patient.setdefault(patients[row], row)
            few_NL[list(first_of_patient.values())[:count], column] = value
    return few_NL


# The command and its page.


def write_neighbours_page(
    result: NeighboursResult,
    path: Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 3,
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in
    `write_zero_shot_page`.
    """
    details = result.results.details
    config = result.results.config
    extra = [
        ("Features", f"{details['feature_dim']:,} numbers, centred and L2-normalised"),
        ("Neighbours", f"k = {details['k']}, chosen on validation images"),
        ("Few labels", f"{config['seeds']} draws of images of different patients"),
        *([("Encoder", details["note"])] if "note" in details else []),
    ]
    page = Page(
        title=f"Neighbours: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=[
            headline(f"AUROC, {title}", result.results.row(f"auroc{ending}", "macro"))
            for ending, title in result.columns.items()
        ],
        facts=facts(result, header, extra=extra),
        sections=[
            summary_table(
                result,
                result.columns,
                title="Summary by method",
                caption="95% intervals over test patients; of few labels the mean over the draws, "
                "and their standard deviation (SD). The sections below show the neighbours.",
            ),
            *sections(result, pixels, examples),
        ],
        limits=LIMITS,
        findings=result.images.names,
    )
    return write_page(page, path)


@register_evaluation("neighbours")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours(Evaluation):
    """Evaluate an image encoder without training: nearest neighbours, prototypes and few labels,
    beside the linear probe.
    """

    divides_batches = True
    tasks = (
        Task(
            fits=ENCODERS,
            columns=(
                Column(title="neighbours", metric="auroc@knn", targets=MEAN),
                Column(
                    title=f"{_TRIAL_SHOTS} labels each",
                    metric=f"auroc@{_TRIAL_SHOTS}-shot",
                    targets=MEAN,
                ),
            ),
        ),
    )

    train: Path
    """folder of shards with labels, among which neighbours are searched"""
    valid: Path
    """folder of shards of other patients, on which k and thresholds are chosen"""
    test: Path
    """folder of shards of further patients, that the encoder was not trained on"""
    shots: tuple[int, ...] = (1, 4, 16)
    """positive, and negative, images of a finding, for the evaluation with few labels"""
    seeds: int = 5
    """random draws of these images"""
    counts: tuple[int, ...] = COUNTS
    """candidates of k, the number of neighbours"""
    cache: Path | None = None
    """folder of cached features, which `medvl eval probe` shares; default `features` beside the
    output folder
    """
    image: EncoderOptions = dataclasses.field(default_factory=EncoderOptions)
    """the image encoder"""
    label: MeanOptions = dataclasses.field(default_factory=MeanOptions)
    """labels, thresholds and means"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the encoder."""
        return self.image.output(options, "neighbours")

    def run(self, setup: Setup) -> Outcome:
        """Open the data and the encoder, and evaluate."""
        opened = open_features(
            self.image, setup, self.train, self.valid, self.test, cache=self.cache
        )
        result = evaluate_neighbours(
            *opened.tables,
            counts=self.counts,
            shots=self.shots,
            seeds=self.seeds,
            policy=self.label.policy(),
            threshold_rule=self.label.threshold_rule,
            resamples=setup.resamples,
            smallest_class=self.label.smallest_class,
            inputs=self.image.hashes(opened.encoder),
        )
        return Outcome(
            result=result,
            model=opened.encoder.name,
            data=opened.source.manifest,
            page=functools.partial(write_neighbours_page, result, pixels=opened.source.pixels),
            table=result.table(),
        )

    @staticmethod
    def scored_classes(lines: Lines, results: Results) -> ScoredClasses:
        """Return the scores of the neighbours."""
        return classes_of_lines(lines, results)._replace(suffix="@knn")

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of prototypes, few labels and the linear probe."""
        names, _, labels_NL, _ = classes_of_lines(lines, results)
        means = results.details["means"]
        groups = []
        for ending, runs in lines[0].get("further", {}).items():
            scores = [
                np.array([[line["further"][ending][run][name] for name in names] for line in lines])
                for run in range(len(runs))
            ]
            groups += [
                over_runs(metric, scores, labels_NL, names, ending, means=means)
                for metric in ("auroc", "average_precision")
            ]
        return groups

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Neighbours":
        """Return the evaluation with few labels of one number."""
        return cls(**inputs_of(trial), shots=(_TRIAL_SHOTS,))
