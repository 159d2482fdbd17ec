"""Robustness of a dual-encoder, fusion-encoder, classifier or linear probe, in one evaluation under
one bootstrap.

Protocol "robustness", version 3. The tests depend on what a model scores: findings (a dual-encoder
by prompts, a classifier), texts compared with images (a dual-encoder by similarity, a
fusion-encoder by the log-odds of a match), or both.

* Clean: AUROC of each finding and their mean ("macro"); "above_other", the share of images that
  score higher with their own text than with another patient's (`medvl.eval.matching`).
* Subgroups: AUROC by view, projection, sex and age, and the gaps between groups
  (`medvl.eval.core.metric_rows`). Sites are a subgroup too: `sites` are shards of other hospitals,
  compared on the findings that all have.
* Calibration: Brier score and calibration error of probabilities, and those after Platt scaling
  with a calibration of `medvl eval calibrate`.
* Prompts: the macro AUROC under several named prompt sets, and under paraphrases of one statement
  and its denial (`sentences.PARAPHRASES`); "auroc_gap" is the best minus the worst set, chosen on
  all images, "auroc_sd" the standard deviation over the sets. Findings are those that every named
  set has sentences of (`PromptSet.for_labels`), here and in all tests; "not_scored" lists the other
  labels of the data, with the sets that lack them.
* Corruptions: macro AUROC and "above_other" of images under noise, blur, another contrast, crops,
  rotations and burned-in marks at five strengths each (`image_versions`), their means, and the
  paired changes from the clean images.
* Negation: an image of a finding should prefer "There is X." to "There is no X.", an image without
  it the reverse. Per finding the mean of both shares ("negation"; ties count one half);
  "negation_present" and "negation_absent" are the two shares. A model that does not read the "no",
  or always prefers one of the two, has 0.5.
* Laterality: "above_mirror", the share of images whose text names a side that score higher with
  their own text than with left and right exchanged.
* Other images: "ood_auroc", how often the confidence of an image of the data exceeds that of other
  images: noise with the spectrum of natural images, inverted grey levels, shuffled tiles, and
  `outside`, shards of other images. The confidence is the largest probability of a finding, or the
  largest similarity (log-odds of a match) with a statement or denial. 0.5: the model is equally
  confident about other images; below 0.5: more confident.
* Intervals: patients are resampled with all their images, in all tests together.

Every image and version of an image is encoded once, every text once. A model that reads precomputed
regions in place of pixels has no corruptions and no made-up images.

Shape letters: N images of the data, T items (images of the data, the sites, and other images), L
findings, V versions.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medvl.data.loading.sources import Source
from medvl.data.splits import check_disjoint
from medvl.errors import EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy, notes_on_means
from medvl.eval.core.full_pass import samples_by_key
from medvl.eval.core.metric_rows import measure, subgroups_of
from medvl.eval.core.metrics import ECE_BINS
from medvl.eval.core.results import Results, checkpoint_sha256, format_table
from medvl.eval.probing.protocol import FittedProbe
from medvl.eval.robustness.assemble import Tests, assemble
from medvl.eval.robustness.image_versions import (
    CORRUPTIONS,
    MADE_UP,
    corruption_versions,
    made_up_versions,
)
from medvl.eval.robustness.scorers import (
    OpenLoader,
    ProbeScorer,
    Scorer,
    Scores,
    make_scorer,
    score_everything,
)
from medvl.eval.zero_shot_classification.calibration import Calibration
from medvl.eval.zero_shot_classification.prompts import PromptSet, default_prompts, load_prompts
from medvl.models.base import System, evaluating

PROTOCOL = "robustness"
PROTOCOL_VERSION = 3
MORE_PROMPTS = ("chexpert_pairs", "chexzero_template")
"""Prompt sets that are tested behind the model's own, where none are named."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RobustnessSettings:
    """Settings of the tests."""

    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    made_up: tuple[str, ...] = tuple(MADE_UP)
    policy: LabelPolicy = dataclasses.field(default_factory=LabelPolicy)
    """Treatment of uncertain and missing labels."""
    smallest_subgroup: int = 10
    """Positives, and negatives, that the AUROC of a subgroup needs."""
    smallest_class: int = 1
    """Positives, and negatives, that a finding needs to be evaluated."""
    resamples: int = 1000
    seed: int = 0
    """Seed of the corruptions and of the bootstrap."""
    autocast: torch.dtype | None = None
    """Dtype of the image encoder."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RobustnessResult:
    """Results, with the scores of the clean images."""

    results: Results
    scores: Scores

    def table(self) -> str:
        """Return the means over findings and over the strengths of each corruption as plain
        text.
        """
        single = {str(version) for version in self.scores.versions}
        rows = [
            row
            for row in self.results.rows
            if row.target in ("macro", "all") and row.subgroup not in single
        ]
        return "\n\n".join([format_table(rows), *notes_on_means(self.results.details)])

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield key, patient, subgroups, labels as in the table, and the values of every clean
        image.

        Values are findings, confidence, statements and texts.
        """
        clean = self.scores.clean
        names = self.scores.scorer.names
        values = {name: value.tolist() for name, value in clean.values.items() if name != "prompts"}
        for row, sample in enumerate(clean.samples):
            line = {name: column[row] for name, column in values.items()}
            if "findings" in line:
                line["findings"] = dict(zip(names, line["findings"], strict=True))
            labels = dict(zip(self.scores.label_names, clean.labels_NL[row].tolist(), strict=True))
            names_of = {
                "key": sample.key,
                "patient": sample.patient,
                "subgroups": subgroups_of(sample),
            }
            yield {**names_of, "labels": labels, **line}


def evaluate_robustness(
    model: System,
    source: Source,
    open_loader: OpenLoader,
    *,
    prompts: Sequence[PromptSet | str | Path] = (),
    sites: Mapping[str, Source] | None = None,
    outside: Mapping[str, Source] | None = None,
    calibration: Calibration | None = None,
    probe: FittedProbe | None = None,
    settings: RobustnessSettings | None = None,
    checkpoint: str | Path | None = None,
) -> RobustnessResult:
    """Test a model by the protocol of this module.

    Args:
        model: a dual-encoder, a fusion-encoder or a classifier.
        source: test images with labels, texts or both.
        open_loader: opens a loader of a source, prepared for the model.
        prompts: prompt sets of a dual-encoder; the first one scores the findings in all tests.
            Default the model's own (`DualEncoder.zero_shot_prompts`) and `MORE_PROMPTS`.
        sites: name -> labelled images of other hospitals.
        outside: name -> images that are not chest radiographs.
        calibration: of the model and the first prompt set.
        probe: linear probe of the model's image encoder, which then scores the findings; texts are
            not compared.
        settings: settings of the tests.
        checkpoint: directory or file whose hash is recorded in the results.

    Raises ConfigError if the model scores neither findings nor pairs, and EvaluationError if the
    data has neither labels of the model's findings nor texts, if images are missing, if scores are
    not finite, or if the calibration was fitted with another content of the first prompt set or
    another checkpoint. Raises SplitError if the probe was fitted to patients of the data or the
    sites.
    """
    settings = settings or RobustnessSettings()
    sites = sites or {}
    outside = outside or {}
    named = prompts or (default_prompts(model), *MORE_PROMPTS)
    sets = [one if isinstance(one, PromptSet) else load_prompts(one) for one in named]
    weights = None if checkpoint is None else checkpoint_sha256(checkpoint)
    if calibration is not None:
        _check_calibration(calibration, sets[0], weights)
    with evaluating(model):
        if probe is None:
            scorer = make_scorer(model, sets, source.label_names, settings.autocast)
        else:
            scorer = _probe_scorer(probe, source, sites, settings)
        scores = score_everything(
            scorer,
            source,
            open_loader,
            versions=corruption_versions(settings.corruptions),
            made_up=made_up_versions(settings.made_up),
            sites=sites,
            outside=outside,
            seed=settings.seed,
        )
    described = _describe_inputs(sets if scorer.prompt_sets else (), sites, outside, probe)
    inputs = {"checkpoint": weights, "manifest": source.fingerprint, **described}
    assembled = assemble(
        scores, settings.policy, settings.smallest_subgroup, calibration, settings.smallest_class
    )
    return RobustnessResult(results=_measure(assembled, settings, scorer, inputs), scores=scores)


def _check_calibration(
    calibration: Calibration, prompts: PromptSet, checkpoint: str | None
) -> None:
    """Raise EvaluationError for a calibration of other prompts, or of another checkpoint than
    this hash, if known.
    """
    expected = {"prompts": prompts.sha256, "checkpoint": checkpoint}
    for name, sha256 in expected.items():
        if sha256 not in (None, getattr(calibration, f"{name}_sha256")):
            message = (
                f"the calibration, made with the prompts {calibration.prompts!r}, is of another "
                f"{name} than this evaluation, whose first prompts are {prompts.name!r}"
            )
            raise EvaluationError(
                f"{message}; run medvl eval calibrate again", "mismatch", field="calibration"
            )


def _measure(
    tests: Tests, settings: RobustnessSettings, scorer: Scorer, inputs: Mapping[str, str | None]
) -> Results:
    rows = measure(
        tests.groups,
        len(tests.patients),
        resamples=settings.resamples,
        seed=settings.seed,
        groups=tests.patients,
    )
    return Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rows,
        config=_describe(settings, scorer),
        inputs=inputs,
        details=tests.details,
    )


def _probe_scorer(
    probe: FittedProbe, source: Source, sites: Mapping[str, Source], settings: RobustnessSettings
) -> ProbeScorer:
    tested = [
        sample.patient
        for one in (source, *sites.values())
        for _, sample in samples_by_key(one).values()
    ]
    check_disjoint({**probe.patients, "test": tested}, "the linear probe")
    return ProbeScorer(probe, source.label_names, settings.autocast)


def _describe(settings: RobustnessSettings, scorer: Scorer) -> dict[str, Any]:
    return {
        **dataclasses.asdict(settings),
        "corruptions": list(settings.corruptions),
        "made_up": list(settings.made_up),
        "autocast": settings.autocast and str(settings.autocast),
        "prompts": list(scorer.prompt_sets),
        "confidence": scorer.confidence_is,
        "ece_bins": ECE_BINS,
    }


def _describe_inputs(
    prompts: Sequence[PromptSet],
    sites: Mapping[str, Source],
    outside: Mapping[str, Source],
    probe: FittedProbe | None,
) -> dict[str, str | None]:
    return {
        **(
            {}
            if probe is None
            else {f"probe {part}": value for part, value in probe.manifests.items()}
        ),
        **{f"prompts {one.name}": one.sha256 for one in prompts},
        **{f"site {name}": one.fingerprint for name, one in sites.items()},
        **{f"outside {name}": one.fingerprint for name, one in outside.items()},
    }
