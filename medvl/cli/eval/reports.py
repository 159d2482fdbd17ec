"""`medvl eval` commands on generated images and reports."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from medvl.cli.eval.options import (
    LabelOptions,
    OutputFolder,
    RunOptions,
    SettledFolder,
    publish_result,
)
from medvl.common.files import sha256
from medvl.errors import ConfigError
from medvl.schema import ConventionsName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from medvl.data.images.generated import GeneratedImages
    from medvl.data.shards.format import Manifest
    from medvl.eval.core.metric_rows import MetricGroup
    from medvl.eval.generation.evaluate import GenerationModels
    from medvl.eval.report_generation.evaluate import GeneratedReport
    from medvl.models.text_decoding import Decoding


# `medvl eval generation`: generated images against real ones.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Models of the evaluation; none may have been trained on a test patient."""

    classifier: Path
    """checkpoint of a fine-tuned classifier of findings, or any system, whose image encoder gets
    a linear probe
    """
    features: Path | None = None
    """folder of the checkpoint whose image encoder makes the features of the distances; default
    --classifier
    """
    encoder: str | None = None
    """name of an image encoder for these features, in place of --features"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default
    the published ones
    """
    aligner: Path | None = None
    """folder of the checkpoint of a dual-encoder that was trained apart from the generator, for
    the alignment
    """
    generator: Path | None = None
    """folder of the generator's checkpoint, to compare its text encoder with that of --aligner"""

    def checkpoints(self) -> list[Path]:
        """Return the folders that are given."""
        given = (self.classifier, self.features, self.aligner, self.generator)
        return [folder for folder in given if folder is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Settings of the distances and of the use as training data."""

    fit: Literal["crop", "pad", "squash"] | None = None
    """how the generator's training images were made square; default as the generator, or crop"""
    views: tuple[str, ...] = ()
    """keep only real images of these views, such as PA AP; copies are searched for in all
    training images
    """
    k: int = 5
    """neighbours of precision, recall, density and coverage"""
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)
    """fractions of the real training patients, with --synthetic-train"""
    seeds: int = 5
    """random subsets per fraction below 1"""
    pixel_size: int = 64
    """side of the squares whose pixels are compared with the training images"""
    cache: Path | None = None
    """folder of cached features; default `features` beside the output folder"""
    conventions: ConventionsName = "chexpert"
    """what the labeler takes as present and as uncertain in a prompt"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Generated images, and real shards."""

    generated: tuple[Path, ...]
    """folders of medvl generate, one for each guidance; the first is the main one. Choose the
    guidance on prompts of validation patients.
    """
    train: tuple[Path, ...]
    """folders of shards with all training images of the generator; the classifier is trained on
    them too
    """
    test: Path
    """folder of shards of other patients, with the real images of the prompts"""
    valid: Path | None = None
    """folder of shards of further patients, on which the classifier's penalty is chosen; by
    default, it is chosen on a tenth of the training patients, which the classifier is then not
    trained on
    """
    reconstructed: Path | None = None
    """folder of the real images of the prompts after the generator's autoencoder (medvl generate
    --reconstruct)
    """
    synthetic_train: Path | None = None
    """folder of images generated from training texts, to train classifiers with"""


def generation(
    images: ImageOptions,
    models: ModelOptions,
    comparison: ComparisonOptions,
    shared: RunOptions,
    label: LabelOptions,
    *,
    examples: int = 4,
) -> None:
    """Evaluate generated images: findings, fidelity, diversity, alignment, memorisation and use,
    with a page.

    Args:
        examples: examples of each kind on the page.
    """
    from medvl.data.images.generated import GeneratedImages
    from medvl.eval.generation.evaluate import evaluate_generation
    from medvl.eval.generation.inputs import LoaderOptions, RealData
    from medvl.eval.generation.page import write_generation_page

    if not images.generated:
        raise ConfigError(
            "give one folder of --generated, or several", "missing", field="generated"
        )
    opened = [GeneratedImages.open(folder) for folder in images.generated]
    reconstructed, synthetic = (
        None if folder is None else GeneratedImages.open(folder)
        for folder in (images.reconstructed, images.synthetic_train)
    )
    real = RealData.open(
        images.train,
        images.valid,
        images.test,
        folders=[*opened, *(each for each in (reconstructed, synthetic) if each is not None)],
        fit=comparison.fit,
        views=comparison.views,
        checkpoints=models.checkpoints(),
    )
    loaded, details = _models(models, opened[0], shared.device)
    path = shared.out or images.generated[0].with_name(f"{images.generated[0].name}-eval")
    hashes = _hashes(models)
    evaluated = {
        "generator": lambda: opened[0].generation.generator,
        "checkpoint": lambda: hashes["checkpoint"],
    }
    output = OutputFolder(path, evaluated, replace=shared.replace)
    folder = output.settle(manifest=real.test.fingerprint)
    cache = comparison.cache or path.parent / "features"
    result = evaluate_generation(
        opened,
        real,
        loaded,
        reconstructed=reconstructed,
        synthetic_train=synthetic,
        options=_options(comparison, shared, label),
        loading=LoaderOptions(batch=shared.batch, workers=shared.workers, cache=cache),
        inputs=hashes,
        details=details,
    )
    page = functools.partial(write_generation_page, result, examples=examples)
    name = f"{opened[0].generation.system} ({images.generated[0]})"
    publish_result(result, folder, page, name, str(images.test), result.table(), options=shared)


def _models(
    options: ModelOptions, images: "GeneratedImages", device: str
) -> "tuple[GenerationModels, dict[str, Any]]":
    """Return the models, and facts about them for the results."""
    from medvl.eval.core.open import load_model, resolve_device, unsupported_model
    from medvl.eval.generation.evaluate import GenerationModels
    from medvl.eval.generation.findings import classifier_of
    from medvl.eval.probing.features import ProbedEncoder
    from medvl.models.dual_encoders.bases.base import DualEncoder

    if options.features is not None and options.encoder is not None:
        raise ConfigError("give --features or --encoder, not both", "conflict", field="features")
    model = load_model(options.classifier, device)
    encoder = ProbedEncoder.from_model(model, name=f"{model.name} ({options.classifier})")
    features = None
    if options.features is not None:
        other = load_model(options.features, device)
        features = ProbedEncoder.from_model(other, name=f"{other.name} ({options.features})")
    elif options.encoder is not None:
        features = ProbedEncoder.from_name(
            options.encoder, pretrained=options.image_weights or True
        )
        features.module.to(resolve_device(device))
    models = GenerationModels(judge=encoder, classifier=classifier_of(model), features=features)
    if options.aligner is None:
        return models, {}
    shared = _check_aligner(options.aligner, options.generator, images)
    aligner = load_model(options.aligner, device)
    if not isinstance(aligner, DualEncoder):
        raise unsupported_model(
            options.aligner, aligner, "give the checkpoint of a dual-encoder", field="aligner"
        )
    return dataclasses.replace(models, aligner=aligner), {"aligner_text_weights_shared": shared}


def _check_aligner(aligner: Path, generator: Path | None, images: "GeneratedImages") -> float:
    """Return the share of the text weights that the aligner has in common with the generator of
    the images.
    """
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.generation.findings import check_separate

    if generator is None:
        message = (
            "--aligner needs --generator, the checkpoint whose text encoder must be another one"
        )
        raise ConfigError(message, "missing", field="generator")
    if checkpoint_sha256(generator) != images.generation.generator:
        message = (
            f"{generator} is not the generator of {images.folder}; give the one that made "
            f"the images"
        )
        raise ConfigError(message, "mismatch", field="generator")
    return check_separate(aligner, generator)


def _options(comparison: ComparisonOptions, shared: RunOptions, label: LabelOptions) -> Any:
    from medvl.eval.generation.evaluate import GenerationOptions
    from medvl.eval.generation.fidelity import FidelityOptions
    from medvl.eval.generation.findings import Resampling
    from medvl.eval.generation.usefulness import UseOptions

    return GenerationOptions(
        policy=label.policy(),
        fidelity=FidelityOptions(k=comparison.k),
        use=UseOptions(fractions=comparison.fractions, seeds=comparison.seeds),
        resampling=Resampling(resamples=shared.resamples),
        pixel_size=comparison.pixel_size,
        conventions=comparison.conventions,
    )


def _hashes(options: ModelOptions) -> dict[str, str | None]:
    from medvl.eval.core.results import checkpoint_sha256

    return {
        "checkpoint": checkpoint_sha256(options.classifier),
        "aligner": None if options.aligner is None else checkpoint_sha256(options.aligner),
    }


# `medvl eval report-generation`: reports generated from images, by a checkpoint or in a file of
# predictions.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Decoding of a checkpoint's reports."""

    beams: int = 1
    """above 1: also evaluate a beam search. It prefers "no abnormality", which has the fewest
    paraphrases
    """
    max_tokens: int | None = None
    """maximum length of a report; default: as in training"""
    length_penalty: float = 0.0
    """above 0 favours longer reports in the beam search"""
    block_ngrams: int = 0
    """above 0: never repeat an n-gram of this length"""
    samples: int = 0
    """above 0: also sample this many reports per image and evaluate the one whose findings agree
    best with the others. The same labeler selects the report and computes the metrics of
    findings
    """
    seed: int = 0
    """seed of sampling"""

    def decodings(self) -> "dict[str, Decoding]":
        """Return the decodings by name."""
        from medvl.models.text_decoding import Decoding

        common: dict[str, Any] = {"max_tokens": self.max_tokens, "block_ngrams": self.block_ngrams}
        decodings = {"greedy": Decoding(**common)}
        if self.beams > 1:
            decodings["beam search"] = Decoding(
                beams=self.beams, length_penalty=self.length_penalty, **common
            )
        if self.samples:
            decodings["consensus"] = Decoding(samples=self.samples, seed=self.seed, **common)
        return decodings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalOptions:
    """Scores by other tools, of the reports in the order of predictions.jsonl."""

    chexbert: tuple[Path, Path] | None = None
    """two files of CheXbert's label.py: of the generated reports and of the references"""
    radgraph: tuple[Path, Path] | None = None
    """two files of RadGraph's annotations: of the generated reports and of the references"""
    metric_scores: Path | None = None
    """file of CXR-Report-Metric"""

    def groups(
        self, reports: "Sequence[GeneratedReport]", uncertain: Literal["negative", "positive"]
    ) -> "list[MetricGroup]":
        """Return the requested metrics."""
        from medvl.eval.report_generation import external_scores as external

        groups: list[MetricGroup] = []
        if self.chexbert is not None:
            texts = [(report.generated, report.reference) for report in reports]
            groups.append(external.chexbert_metrics(*self.chexbert, texts, uncertain))
        if self.radgraph is not None:
            groups += external.radgraph_metrics(
                *(external.read_radgraph(path, len(reports)) for path in self.radgraph)
            )
        if self.metric_scores is not None:
            groups += external.report_metric_scores(self.metric_scores, len(reports))
        return groups

    def inputs(self) -> dict[str, str]:
        """Return the hashes of the files that are read."""
        named = {"chexbert": self.chexbert, "radgraph": self.radgraph}
        hashes = {
            f"{name}_{side}": sha256(path)
            for name, pair in named.items()
            for side, path in zip(("generated", "references"), pair or (), strict=False)
        }
        if self.metric_scores is not None:
            hashes["metric_scores"] = sha256(self.metric_scores)
        return hashes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reports:
    """Reports to evaluate, and their origin."""

    reports: "list[GeneratedReport]"
    others: "dict[str, list[GeneratedReport]]" = dataclasses.field(default_factory=dict)
    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str | None]
    folder: SettledFolder
    """Folder of the results."""
    data: "Manifest | str"
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Flat = tyro.conf.arg(name="")


def report_generation(
    shared: RunOptions,
    decoding: Annotated[DecodingOptions, Flat],
    external: Annotated[ExternalOptions, Flat],
    *,
    data: Path | None = None,
    checkpoint: Path | None = None,
    predictions: Path | None = None,
    sections: tuple[str, ...] = ("findings", "impression"),
    phantom_truth: Path | None = None,
    uncertain: Literal["negative", "positive"] = "negative",
    conventions: ConventionsName = "chexpert",
) -> None:
    """Evaluate report generation: n-gram overlap and clinical F1 of generated reports against
    references and labels.

    The checkpoint is an R2Gen, or a MedViLL trained with objective "report". Greedy search is
    always evaluated.

    Args:
        data: folder of shards of patients that the model was not trained on.
        checkpoint: folder of a checkpoint, such as runs/r2gen-iu/best.
        predictions: reports of another system instead of a checkpoint: JSON lines with key and
            generated, and also reference if --data is not given.
        sections: sections of the references; those that the model was trained to generate.
        phantom_truth: folder of `medvl phantom mimic-cxr` that the shards are from: compare
            findings with what its images show, not with the labels of its reports.
        uncertain: label of findings that a report mentions as uncertain.
        conventions: what the labeler takes as present and as uncertain: as CheXpert's labeler; as
            it, with any borderline finding as uncertain; or as people who index reports, for whom a
            probable finding is present.
    """
    from medvl.eval.report_generation.evaluate import evaluate_reports
    from medvl.eval.report_generation.page import write_report_page

    if (checkpoint is None) == (predictions is None):
        raise ConfigError(
            "give exactly one of --checkpoint and --predictions", "conflict", field="checkpoint"
        )
    output = shared.folder(checkpoint or predictions, "report_generation")
    if checkpoint is None:
        assert predictions is not None
        given = _from_file(predictions, data, output, sections)
    else:
        given = _from_checkpoint(
            checkpoint, data, output, shared, decoding, sections, phantom_truth, conventions
        )
    result = evaluate_reports(
        given.reports,
        others=given.others,
        uncertain=uncertain,
        conventions=conventions,
        extra=external.groups(given.reports, uncertain),
        resamples=shared.resamples,
        config={"sections": list(sections), **given.config},
        inputs={**given.inputs, **external.inputs()},
        details=given.details,
    )
    page = functools.partial(write_report_page, result)
    publish_result(
        result, given.folder, page, given.name, given.data, result.table(), options=shared
    )


def _from_file(
    predictions: Path, data: Path | None, output: OutputFolder, sections: tuple[str, ...]
) -> _Reports:
    from medvl.eval.core.open import open_source
    from medvl.eval.report_generation.evaluate import read_reports, references_of

    source = None if data is None else open_source(data)
    references = None if source is None else references_of(source, sections)
    return _Reports(
        reports=read_reports(predictions, references),
        name=str(predictions),
        inputs={"predictions": sha256(predictions)},
        folder=output.settle(),
        data=str(predictions) if source is None else source.manifest,
    )


def _from_checkpoint(
    checkpoint: Path,
    data: Path | None,
    output: OutputFolder,
    shared: RunOptions,
    decoding: DecodingOptions,
    sections: tuple[str, ...],
    phantom_truth: Path | None,
    conventions: ConventionsName,
) -> _Reports:
    from medvl.eval.core.full_pass import input_hashes
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.report_generation.generate import ReportWriter, count_cut, generate_by_decoding
    from medvl.schema import Inputs

    if data is None:
        raise ConfigError("a checkpoint needs images; give --data", "missing", field="data")
    decodings = decoding.decodings()
    labels = None if phantom_truth is None else _truth(phantom_truth)
    model = load_model(checkpoint, shared.device)
    if not isinstance(model, ReportWriter):
        raise unsupported_model(checkpoint, model, "give the checkpoint of an R2Gen or a MedViLL")
    source = open_source(data, [checkpoint])
    folder = output.settle(manifest=source.fingerprint)
    loader = open_for_evaluation(
        source,
        model.transform,
        model.tokenizer,
        batch=shared.batch,
        workers=shared.workers,
        inputs=Inputs(other_view=model.inputs.other_view),
    )
    generated = generate_by_decoding(
        model, loader, decodings, sections=sections, labels=labels, conventions=conventions
    )
    reports = generated.pop("greedy")
    assert model.tokenizer is not None
    return _Reports(
        reports=reports,
        others=generated,
        name=f"{model.name} ({checkpoint})",
        config={
            "decodings": {name: dataclasses.asdict(each) for name, each in decodings.items()},
            "labels": "of the data" if phantom_truth is None else "ground truth of the phantom",
            "model": model.name,
        },
        inputs=input_hashes(checkpoint, manifest=loader),
        folder=folder,
        data=source.manifest,
        details={
            "without_reference": len(loader.source) - len(reports),
            "unreadable": dict(loader.skipped),
            "references_cut_in_training": count_cut(model.tokenizer, reports),
        },
    )


def _truth(folder: Path) -> dict[str, dict[str, int]]:
    """Return the ground truth of a phantom by sample key, with the default salt."""
    from medvl.cli.shards.corpora import deidentifier
    from medvl.phantom import read_truth

    deid = deidentifier(None)
    return {
        deid.image(row["dicom_id"]): row["labels"]
        for row in read_truth(folder)
        if "dicom_id" in row
    }
