"""`medvl eval` commands that score findings: zero-shot, calibrate, classify, probe and
robustness.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.cli.eval.options import (
    EvalOptions,
    MeanOptions,
    RunOptions,
    open_evaluation,
    publish_result,
)
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from medvl.eval import Loader
    from medvl.eval.probing.features import FeatureTable, ProbedEncoder
    from medvl.eval.probing.fitted import FittedProbe
    from medvl.eval.zero_shot_classification.calibration import Calibration
    from medvl.models import System


# `medvl eval calibrate`: probabilities for zero-shot scores.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compute:
    """Compute options."""

    batch: int = 64
    """batch size"""
    workers: int = 2
    """loader processes"""
    device: str = "auto"
    """auto, cpu or cuda"""


def calibrate(
    checkpoint: Path,
    data: Path,
    shared: _Compute,
    *,
    prompts: str = "chexpert_ensemble",
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore",
    missing: Literal["ignore", "negative"] = "negative",
    out: Path | None = None,
    replace: bool = False,
) -> None:
    """Calibrate the zero-shot scores of a checkpoint on validation shards, for `medvl serve`.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best.
        data: folder of shards with labels, of patients that the model was not trained on.
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file of your own.
        uncertain: treatment of uncertain labels (-1).
        missing: treatment of missing labels.
        out: file to write; default RUN/eval/STEP/calibration/PROMPTS.json, or CHECKPOINT/eval/...
            outside of a run.
        replace: replace the calibration of another checkpoint in `out`.
    """
    from medvl.eval.classification.scored_images import LabelPolicy
    from medvl.eval.core.open import load_ensemble, open_for_evaluation, open_source
    from medvl.eval.core.results import check_output
    from medvl.eval.zero_shot_classification import calibration as fit
    from medvl.eval.zero_shot_classification.evaluate import common_classes
    from medvl.eval.zero_shot_classification.prompts import load_prompts

    prompt_set = load_prompts(prompts)
    path = out or fit.calibration_path(checkpoint, prompt_set.name)
    check_output(path.parent)
    source = open_source(data, [checkpoint])
    common_classes(prompt_set.for_labels(source.label_names), source)
    (model,) = load_ensemble([checkpoint], shared.device)
    result = fit.calibrate(
        model,
        open_for_evaluation(source, model.transform, batch=shared.batch, workers=shared.workers),
        prompt_set,
        checkpoint=checkpoint,
        policy=LabelPolicy(uncertain=uncertain, missing=missing),
        data={"corpus": source.manifest.corpus, "split": source.manifest.split},
    )
    fit.write_calibration(result, path, replace=replace)
    print(fit.calibration_table(result), "", path, sep="\n")


# `medvl eval classify`: a trained multi-label classifier.


def classify(shared: EvalOptions, label: MeanOptions, *, valid: Path | None = None) -> None:
    """Evaluate a classifier of recipes/linear_probe.py or recipes/classify_openi.py, with intervals
    and a page.

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it, no
            yes/no metrics.
    """
    from medvl.eval.classification import evaluate
    from medvl.eval.classification.page import write_classification_page
    from medvl.eval.core.open import open_source
    from medvl.models import LabelModel

    checkpoint = shared.checkpoint
    advice = "train a classifier on it with recipes/linear_probe.py"
    output = shared.folder(checkpoint, "classify")
    model, source, read = open_evaluation(shared, LabelModel, advice, text=True)
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate.classify(
        model,
        read(source),
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_classification_page, result, pixels=source.pixels)
    publish_result(
        result,
        folder,
        page,
        f"{model.name} of {model.reads} ({checkpoint})",
        source.manifest,
        result.table(),
        options=shared,
    )


# `medvl eval zero-shot`: zero-shot classification by a dual-encoder.


def zero_shot(
    checkpoint: tuple[Path, ...],
    data: Path,
    shared: RunOptions,
    label: MeanOptions,
    *,
    valid: Path | None = None,
    prompts: str | None = None,
    labels: tuple[str, ...] = (),
) -> None:
    """Evaluate zero-shot classification on a folder of shards, with intervals and a page.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best; the scores of several are
            averaged (ensemble).
        data: folder of shards with labels, of patients that the model was not trained on.
        valid: folder of shards of other patients, on which thresholds are chosen; without it, no
            yes/no metrics.
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file of your own, of
            the format in docs/pages/guides/evaluation.md; default chexpert_ensemble, and statements
            for systems that are trained on statements (RadZero, CARZero, MedKLIP, KAD, MAVL).
        labels: findings to evaluate; default all that have prompts and are labels of the shards.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import load_ensemble, open_for_evaluation, open_source
    from medvl.eval.zero_shot_classification import evaluate
    from medvl.eval.zero_shot_classification.evaluate import write_zero_shot_page
    from medvl.eval.zero_shot_classification.prompts import load_prompts

    task = "zero_shot" if len(checkpoint) == 1 else "zero_shot_ensemble"
    output = shared.folder(checkpoint[0], task, hashed=len(checkpoint) == 1)
    prompt_set = None if prompts is None else load_prompts(prompts)
    source = open_source(data, checkpoint)
    if prompt_set is not None:
        # errors of prompts and data come before the models are loaded
        evaluate.common_classes(prompt_set.for_labels(source.label_names, labels), source)
    folder = output.settle(manifest=source.fingerprint)
    models = load_ensemble(checkpoint, shared.device)
    read = functools.partial(
        open_for_evaluation,
        transform=models[0].transform,
        tokenizer=models[0].tokenizer,
        batch=shared.batch,
        workers=shared.workers,
        ranks=rank_and_world(),
    )
    result = evaluate.zero_shot(
        models,
        read(source),
        prompt_set,
        labels=labels,
        valid_loader=None if valid is None else read(open_source(valid, checkpoint)),
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_zero_shot_page, result, pixels=source.pixels)
    name = f"{models[0].name} ({', '.join(map(str, checkpoint))})"
    publish_result(result, folder, page, name, source.manifest, result.table(), options=shared)


# `medvl eval probe`: a linear probe of an image encoder.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The image encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with an image encoder"""
    random_weights: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of an image encoder with random weights, such as resnet50"""
    pretrained: bool = False
    """use the published weights of --encoder"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub"""
    image_arguments: Mapping[str, bool | int | float | str | tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )
    """arguments of --encoder, such as mean 0.5 std 0.5 pad_type same"""
    image_size: int | None = None
    """image size of --encoder, where it can be chosen"""


def probe(
    train: Path,
    valid: Path,
    test: Path,
    image: EncoderOptions,
    shared: RunOptions,
    label: MeanOptions,
    *,
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    levels: str | None = None,
    cache: Path | None = None,
) -> None:
    """Evaluate an image encoder by a linear probe at fractions of the labels, with intervals and a
    page.

    Args:
        train: folder of shards with labels, on which the probe is fitted.
        valid: folder of shards of other patients, on which penalty and thresholds are chosen.
        test: folder of shards of further patients, that the encoder was not trained on.
        fractions: fractions of the training patients whose labels are used.
        seeds: random subsets per fraction below 1.
        levels: ordinal AUCs of a graded finding instead of the labels, such as
            edema_severity=none,mild,moderate,severe (lowest first) for shards with
            --category-column edema_severity.
        cache: folder of cached features; default `features` beside the output folder.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.probing.evaluate import linear_probe, write_probe_page

    probed = _open_encoder(image, test, shared.device)
    task = "probe_random" if image.random_weights else "probe"
    output = shared.folder(image.checkpoint, task, hashed=not image.random_weights)
    source = open_source(test)
    folder = output.settle(manifest=source.fingerprint)
    features = functools.partial(
        _features, probed, cache or output.path.parent / "features", shared, levels
    )
    result = linear_probe(
        features(train, synthetic=True),
        features(valid),
        features(test),
        fractions=fractions,
        seeds=seeds,
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        inputs=_hashes(image, probed),
    )
    page = functools.partial(write_probe_page, result, pixels=source.pixels)
    publish_result(
        result, folder, page, probed.name, source.manifest, result.table(), options=shared
    )


def _open_encoder(options: EncoderOptions, test: Path, device: str) -> "ProbedEncoder":
    from medvl.eval.core.open import load_model, open_source, resolve_device
    from medvl.eval.probing.features import ProbedEncoder

    checkpoint = options.checkpoint
    encoder = options.encoder
    if checkpoint is not None and encoder is None:
        open_source(
            test, [checkpoint]
        )  # refuses test patients of its training data before the model is loaded
        model = load_model(checkpoint, device)
        return ProbedEncoder.from_model(
            model, name=f"{model.name} ({checkpoint})", random=options.random_weights
        )
    if encoder is not None and checkpoint is None and not options.random_weights:
        if options.pretrained and options.image_weights is not None:
            raise ConfigError(
                "give --pretrained or --image-weights, not both", "conflict", field="image_weights"
            )
        arguments: dict[str, Any] = dict(options.image_arguments)
        if options.image_size is not None:
            arguments["image_size"] = options.image_size
        probed = ProbedEncoder.from_name(
            encoder, pretrained=options.image_weights or options.pretrained, **arguments
        )
        probed.module.to(resolve_device(device))
        return probed
    message = (
        "expected --checkpoint (with --random-weights for the baseline) or --encoder; "
        "give exactly one"
    )
    raise ConfigError(message, "conflict", field="checkpoint")


def _hashes(options: EncoderOptions, probed: "ProbedEncoder") -> dict[str, str | None]:
    from medvl.eval.core.results import checkpoint_sha256

    trained = None if options.random_weights else options.checkpoint
    return {
        "checkpoint": None if trained is None else checkpoint_sha256(trained),
        "encoder": probed.sha256,
    }


def _features(
    encoder: "ProbedEncoder",
    cache: Path,
    shared: RunOptions,
    levels: str | None,
    data: Path,
    *,
    synthetic: bool = False,
) -> "FeatureTable":
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import open_for_evaluation, open_source
    from medvl.eval.probing.evaluate import ordinal_table, parse_levels
    from medvl.eval.probing.features import encode_features

    graded = None if levels is None else parse_levels(levels)
    source = open_source(data, synthetic=synthetic)
    loader = open_for_evaluation(
        source,
        encoder.transform,
        batch=shared.batch,
        workers=shared.workers,
        ranks=rank_and_world(),
    )
    table = encode_features(encoder, loader, cache=cache)
    return table if graded is None else ordinal_table(table, *graded)


# `medvl eval robustness`: subgroups, sites, calibration, prompts, corruptions, negation, sides,
# other images.

_ADVICE = "give a system's checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The data of a linear probe: give both or none."""

    probe_train: Path | None = None
    """folder of labelled shards of other patients, to which a linear probe of the image encoder
    is fitted
    """
    probe_valid: Path | None = None
    """folder of labelled shards of further patients, on which the penalty of the probe is chosen"""

    def splits(self, prompts: Sequence[str], calibration: Path | None) -> list[Path]:
        """Return both folders, or nothing. Raises ConfigError where one is missing or an option
        does not apply.
        """
        found = [path for path in (self.probe_train, self.probe_valid) if path is not None]
        if len(found) == 1:
            raise ConfigError(
                "give both --probe-train and --probe-valid", "conflict", field="probe_train"
            )
        if found and (prompts or calibration is not None):
            raise ConfigError(
                "a linear probe has no prompts and no calibration", "conflict", field="probe_train"
            )
        return found


def robustness(
    shared: EvalOptions,
    label: MeanOptions,
    fit: ProbeOptions,
    *,
    prompts: tuple[str, ...] = (),
    corruptions: tuple[str, ...] = ("noise", "blur", "contrast", "crop", "rotation", "marks"),
    made_up: tuple[str, ...] = ("natural noise", "inverted", "shuffled tiles"),
    sites: tuple[Path, ...] = (),
    outside: tuple[Path, ...] = (),
    calibration: Path | None = None,
    seed: int = 0,
) -> None:
    """Test a model on other patients, sites, image qualities and wordings, and on images that are
    not radiographs.

    The checkpoint is a dual-encoder, a fusion-encoder or a classifier; the shards have labels,
    texts or both. With --probe-train and --probe-valid it is any system with an image encoder, and
    a linear probe scores the findings.

    Args:
        prompts: prompt sets of a dual-encoder (`medvl list prompts`, or JSON files); the first
            scores the findings. Default chexpert_ensemble (statements for systems that are trained
            on statements), chexpert_pairs and chexzero_template.
        corruptions: corruptions, each at five strengths.
        made_up: images that are not radiographs, made from those of the data.
        sites: folders of labelled shards of other hospitals.
        outside: folders of shards of images that are not chest radiographs, such as those of `medvl
            phantom roco`.
        calibration: file of `medvl eval calibrate`; default the one beside the checkpoint, if there
            is one.
        seed: seed of the corruptions and of the intervals.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.robustness.evaluate import RobustnessSettings, evaluate_robustness
    from medvl.eval.robustness.page import write_robustness_page
    from medvl.eval.zero_shot_classification.prompts import default_prompts, load_prompts
    from medvl.models import System

    splits = fit.splits(prompts, calibration)
    sets = [load_prompts(name) for name in prompts]
    kind: type[System] = System
    model, source, read = open_evaluation(shared, kind, _ADVICE, text=not splits)
    output = shared.folder(shared.checkpoint, "robustness_probe" if splits else "robustness")
    folder = output.settle(manifest=source.fingerprint)
    probe = _probe(model, read, splits, output.path.parent / "features", label) if splits else None
    first = sets[0].name if sets else default_prompts(model)
    result = evaluate_robustness(
        model,
        source,
        read,
        prompts=sets,
        sites={
            name: open_source(path, [shared.checkpoint]) for name, path in _named(sites).items()
        },
        outside={name: open_source(path) for name, path in _named(outside).items()},
        calibration=None if splits else _calibration(calibration, shared.checkpoint, first),
        probe=probe,
        settings=RobustnessSettings(
            corruptions=corruptions,
            made_up=made_up,
            policy=label.policy(),
            smallest_class=label.smallest_class,
            resamples=shared.resamples,
            seed=seed,
        ),
        checkpoint=shared.checkpoint,
    )
    name = f"{'linear probe of ' if splits else ''}{model.name} ({shared.checkpoint})"
    page = functools.partial(write_robustness_page, result, pixels=source.pixels)
    publish_result(result, folder, page, name, source.manifest, result.table(), options=shared)


def _probe(
    model: "System",
    read: "Callable[..., Loader]",
    splits: Sequence[Path],
    cache: Path,
    label: MeanOptions,
) -> "FittedProbe":
    """Return a linear probe of the model's image encoder; its features are cached as those of
    `medvl eval probe`.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.probing.features import ProbedEncoder, encode_features
    from medvl.eval.probing.fitted import FittedProbe

    encoder = ProbedEncoder.from_model(model, name=model.name)
    sources = [open_source(path, synthetic=path == splits[0]) for path in splits]
    train, valid = (encode_features(encoder, read(source), cache=cache) for source in sources)
    return FittedProbe.fit(encoder, train, valid, policy=label.policy())


def _named(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Return short name -> folder: the last two parts of the path, or all of it where these are
    not unique.
    """
    short = ["/".join(path.parts[-2:]) for path in folders]
    names = [
        str(path) if short.count(name) > 1 else name
        for name, path in zip(short, folders, strict=True)
    ]
    return dict(zip(names, folders, strict=True))


def _calibration(path: Path | None, checkpoint: Path, prompts: str) -> "Calibration | None":
    """Return the calibration of a file, or that beside the checkpoint for its prompts; None if
    there is none.
    """
    from medvl.eval.zero_shot_classification.calibration import calibration_path, read_calibration

    default = calibration_path(checkpoint, prompts)
    return read_calibration(path or default) if path is not None or default.is_file() else None
