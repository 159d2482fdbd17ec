"""Zero-shot classification: findings scored by their sentences, judged against labels.

Protocol "zero_shot", version 1:

* Every readable image of the loader is scored once; a score depends on its image and the prompts alone.
* AUROC and average precision a finding; "macro" is the mean over the findings that have both classes, and
  "macro_competition" that over the five of the CheXpert competition, where all five have.
* Yes/no metrics only with a validation loader: thresholds are chosen there and nowhere else, and a patient in both
  sets is an error.
* Brier score and calibration error where the prompts give probabilities.
* Where classes compete, the share of images whose one class scores highest.
* Subgroup rows as `medvl.eval.subgroups` says.
* Intervals: patients are drawn, with all their images (`draw="image"`: images are). All rows share the draws.

Shape letters: N images, L classes, R resamples.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from medvl.errors import EvaluationError, ShardError, SplitError
from medvl.eval.metrics import Array, choose_threshold
from medvl.eval.policies import LabelPolicy
from medvl.eval.predict import predict
from medvl.eval.prompts import PromptSet, load_prompts
from medvl.eval.protocols import Loader, Model, Source
from medvl.eval.results import Results, checkpoint_sha256, format_table
from medvl.eval.rows import Block, calibration_block, decision_block, measure, one_of_many_block, ranking_block
from medvl.eval.subgroups import subgroup_blocks
from medvl.schema import COMPETITION_FINDINGS, Sample

PROTOCOL, PROTOCOL_VERSION = "zero_shot", 1

Draw = Literal["patient", "image"]
ThresholdRule = Literal["f1", "mcc", "youden"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredImages:
    """A data set with its scores, in the loader's order."""

    names: tuple[str, ...]
    """Classes that are judged: those of the prompts that the data have a label column for."""
    scores_NL: Array
    labels_NL: Array
    """1, 0 or NaN (left out), after the policy."""
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Place of each sample in the loader's source."""
    account: Mapping[str, Any]
    """What was read, judged and left out, as JSON."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]

    @property
    def judgeable(self) -> list[str]:
        """Classes with positives and negatives."""
        both = (self.labels_NL == 1).any(axis=0) & (self.labels_NL == 0).any(axis=0)
        return [name for name, judged in zip(self.names, both, strict=True) if judged]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShotResult:
    """The results, and the scores behind them for the page and the predictions file."""

    results: Results
    prompts: PromptSet
    images: ScoredImages
    thresholds: Mapping[str, float] | None
    """By class, chosen on validation images; NaN where those have one class only."""

    @property
    def groups(self) -> list[str] | None:
        """What was drawn for the intervals, for statistics of one's own on the same draws."""
        return self.images.patients if self.results.config["draw"] == "patient" else None

    def table(self) -> str:
        """The findings and the means of subgroups, as plain text."""
        rows = [row for row in self.results.rows if not row.subgroup or row.target == "macro"]
        return format_table(rows)

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an image: key, scores, and labels (null: left out), as `write_results` takes them."""
        images = self.images
        rows = zip(images.samples, images.scores_NL.tolist(), images.labels_NL.tolist(), strict=True)
        for sample, scores, labels in rows:
            yield {
                "key": sample.key,
                "scores": dict(zip(images.names, scores, strict=True)),
                "labels": dict(zip(images.names, labels, strict=True)),
            }


def zero_shot(
    model: Model,
    loader: Loader,
    prompts: PromptSet | str | Path = "chexpert_ensemble",
    *,
    valid_loader: Loader | None = None,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    draw: Draw = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | None = None,
) -> ZeroShotResult:
    """Judge a dual-encoder on labelled images without training on labels; the protocol is at the top of this module.

    `prompts` is a set, the name of one of ours, or the path of a JSON file. `valid_loader` has images of other
    patients, on which thresholds are chosen to maximise `threshold_rule`. `smallest_subgroup` is how many positives,
    and negatives, the AUROC of a subgroup needs. `autocast` is a type for the image encoder, such as `torch.bfloat16`;
    the hash of `checkpoint` (a directory or a file) goes into the results.

    Raises:
        EvaluationError: no class of the prompts can be judged, or the loader or the scores are not whole.
        SplitError: test and validation images share patients.
    """
    if draw not in get_args(Draw):
        raise EvaluationError(f"draw is {draw!r}: choose one of {', '.join(get_args(Draw))}")
    prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
    policy = policy or LabelPolicy()
    inputs = {
        "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
        "manifest": loader.source.fingerprint,
        "validation_manifest": None if valid_loader is None else valid_loader.source.fingerprint,
        "prompts": prompts.sha256,
    }
    config = {
        "prompts": _describe(prompts),
        "policy": dataclasses.asdict(policy),
        "threshold_rule": None if valid_loader is None else threshold_rule,
        "draw": draw,
        "resamples": resamples,
        "seed": seed,
        "smallest_subgroup": smallest_subgroup,
        "autocast": None if autocast is None else str(autocast),
    }
    test = score_images(model, loader, prompts, policy, autocast)
    thresholds = None
    if valid_loader is not None:
        valid = score_images(model, valid_loader, prompts, policy, autocast)
        thresholds = _choose_thresholds(valid, test, threshold_rule)
    results = _judge(test, prompts, thresholds, config, inputs)
    return ZeroShotResult(results=results, prompts=prompts, images=test, thresholds=thresholds)


def score_images(
    model: Model, loader: Loader, prompts: PromptSet, policy: LabelPolicy, autocast: torch.dtype | None = None
) -> ScoredImages:
    """Every image of a loader with its scores and its labels under the policy. Raises `EvaluationError`."""
    source = loader.source
    names = _classes_in_common(prompts, source)
    predictions = predict(model, loader, [prompts], autocast=autocast)
    columns = [list(prompts.classes).index(name) for name in names]
    resolved = policy.resolve(predictions.labels_NL, predictions.label_names)
    place_of = _places(source)
    positions, samples = zip(*(place_of[key] for key in predictions.keys), strict=True)
    account = {
        "images": len(samples),
        "patients": len({sample.patient for sample in samples}),
        "unreadable": dict(predictions.unreadable),
        "classes_without_labels": [name for name in prompts.classes if name not in names],
        "labels": {name: dict(resolved.counts[name]) for name in names},
        "no_finding_contradictions": resolved.contradictions,
    }
    return ScoredImages(
        names=names,
        scores_NL=predictions.scores_NL[0][:, columns],
        labels_NL=resolved.labels_NL[:, [predictions.label_names.index(name) for name in names]],
        samples=samples,
        positions=positions,
        account=account,
    )


def _classes_in_common(prompts: PromptSet, source: Source) -> tuple[str, ...]:
    names = tuple(name for name in prompts.classes if name in source.label_names)
    if not names:
        raise EvaluationError(
            f"prompt set {prompts.name!r} ({', '.join(prompts.classes)}) and the labels of the data "
            f"({', '.join(source.label_names) or 'none'}) have no class in common"
        )
    return names


def _places(source: Source) -> dict[str, tuple[int, Sample]]:
    """Position and sample by key. What cannot be read is left out: the loader has counted it."""
    places = {}
    for position in range(len(source)):
        try:
            sample = source.sample(position)
        except ShardError:
            continue
        places[sample.key] = (position, sample)
    return places


def _choose_thresholds(valid: ScoredImages, test: ScoredImages, rule: ThresholdRule) -> dict[str, float]:
    shared = len({*valid.patients} & {*test.patients})
    if shared:
        raise SplitError(
            f"{shared} patients are in the validation and in the test images: thresholds would be chosen on patients "
            "that they are judged on. Use splits that are disjoint by patient."
        )
    columns = zip(valid.names, valid.scores_NL.T, valid.labels_NL.T, strict=True)
    chosen = {name: choose_threshold(scores_N, labels_N, rule) for name, scores_N, labels_N in columns}
    return {name: chosen.get(name, float("nan")) for name in test.names}


def _judge(
    test: ScoredImages,
    prompts: PromptSet,
    thresholds: Mapping[str, float] | None,
    config: Mapping[str, Any],
    inputs: Mapping[str, str | None],
) -> Results:
    blocks = _blocks(test, prompts, thresholds)
    of_groups, labels_in_mean = subgroup_blocks(
        test.scores_NL, test.labels_NL, test.names, test.samples, config["smallest_subgroup"]
    )
    rows = measure(
        [*blocks, *of_groups],
        len(test.samples),
        resamples=config["resamples"],
        seed=config["seed"],
        groups=test.patients if config["draw"] == "patient" else None,
    )
    details = {**test.account, "thresholds": thresholds, "labels_in_subgroup_mean": labels_in_mean}
    return Results(
        protocol=PROTOCOL, protocol_version=PROTOCOL_VERSION, rows=rows, config=config, inputs=inputs, details=details
    )


def _blocks(test: ScoredImages, prompts: PromptSet, thresholds: Mapping[str, float] | None) -> list[Block]:
    """All rows but those of subgroups."""
    if not test.judgeable:
        raise EvaluationError(
            f"none of {', '.join(test.names)} has positive and negative images under this policy: "
            "there is nothing to judge"
        )
    columns = test.scores_NL, test.labels_NL, test.names
    means = {"macro": test.judgeable}
    if set(COMPETITION_FINDINGS) <= set(test.judgeable):
        means["macro_competition"] = list(COMPETITION_FINDINGS)
    blocks = [ranking_block(metric, *columns, means=means) for metric in ("auroc", "average_precision")]
    if prompts.gives_probabilities:
        blocks.append(calibration_block(*columns))
    decided = [index for index, name in enumerate(test.names) if thresholds and not np.isnan(thresholds[name])]
    if thresholds and decided:
        names = [test.names[index] for index in decided]
        predicted_NL = test.scores_NL[:, decided] >= np.array([thresholds[name] for name in names])
        blocks.append(decision_block(predicted_NL, test.labels_NL[:, decided], names))
    if prompts.scoring == "class_softmax":
        blocks.append(one_of_many_block(test.scores_NL, test.labels_NL))
    return blocks


def _describe(prompts: PromptSet) -> dict[str, Any]:
    fields = ("name", "version", "scoring", "temperature", "ensemble")
    return {**{field: getattr(prompts, field) for field in fields}, "classes": list(prompts.classes)}


class ZeroShotEval:
    """Zero-shot AUROC while a model is being trained: `ZeroShotEval(loader)(model)` is a flat mapping of numbers.

    "zero_shot/auroc_macro", "zero_shot/auroc_macro_competition" where all five can be judged, and
    "zero_shot/auroc/<class>" for each class that can; no intervals. Making one raises `EvaluationError` where the data
    has no label of the prompts: better now than after the first epoch.
    """

    def __init__(
        self,
        loader: Loader,
        prompts: PromptSet | str | Path = "chexpert_ensemble",
        *,
        policy: LabelPolicy | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.loader, self.autocast = loader, autocast
        self.prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
        self.policy = policy or LabelPolicy()
        _classes_in_common(self.prompts, loader.source)

    def __call__(self, model: Model) -> dict[str, float]:
        """The numbers for the model as it is now. Raises `EvaluationError` as `zero_shot` does."""
        images = score_images(model, self.loader, self.prompts, self.policy, self.autocast)
        rows = measure(_blocks(images, self.prompts, None)[:1], len(images.samples), resamples=0)
        named = {row.target: row.value for row in rows if not np.isnan(row.value)}
        return {
            f"zero_shot/auroc{'_' if name.startswith('macro') else '/'}{name}": value for name, value in named.items()
        }
