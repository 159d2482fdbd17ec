"""`medvl eval report-generation`: reports generated from images, by a checkpoint or in a file of predictions."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from medvl.cli.eval.options import OutputFolder, RunOptions, SettledFolder, publish_result
from medvl.common.files import sha256
from medvl.errors import ConfigError
from medvl.schema import ConventionsName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from medvl.data.shards.format import Manifest
    from medvl.eval.core.metric_rows import MetricGroup
    from medvl.eval.report_generation.evaluate import GeneratedReport
    from medvl.models.text_decoding import Decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Decoding of a checkpoint's reports."""

    beams: int = 1
    """above 1: also evaluate a beam search. It prefers "no abnormality", which has the fewest paraphrases"""
    max_tokens: int | None = None
    """maximum length of a report; default: as in training"""
    length_penalty: float = 0.0
    """above 0 favours longer reports in the beam search"""
    block_ngrams: int = 0
    """above 0: never repeat an n-gram of this length"""
    samples: int = 0
    """above 0: also sample this many reports per image and evaluate the one whose findings agree best with the others.
    The same labeler selects the report and computes the metrics of findings"""
    seed: int = 0
    """seed of sampling"""

    def decodings(self) -> "dict[str, Decoding]":
        """Return the decodings by name."""
        from medvl.models.text_decoding import Decoding

        common: dict[str, Any] = {"max_tokens": self.max_tokens, "block_ngrams": self.block_ngrams}
        decodings = {"greedy": Decoding(**common)}
        if self.beams > 1:
            decodings["beam search"] = Decoding(beams=self.beams, length_penalty=self.length_penalty, **common)
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
            groups += external.radgraph_metrics(*(external.read_radgraph(path, len(reports)) for path in self.radgraph))
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
    """Evaluate report generation: n-gram overlap and clinical F1 of generated reports against references and labels.

    The checkpoint is an R2Gen, or a MedViLL trained with objective "report". Greedy search is always evaluated.

    Args:
        data: folder of shards of patients that the model was not trained on.
        checkpoint: folder of a checkpoint, such as runs/r2gen-iu/best.
        predictions: reports of another system instead of a checkpoint: JSON lines with key and generated, and also
            reference if --data is not given.
        sections: sections of the references; those that the model was trained to generate.
        phantom_truth: folder of `medvl phantom mimic-cxr` that the shards are from: compare findings with what its
            images show, not with the labels of its reports.
        uncertain: label of findings that a report mentions as uncertain.
        conventions: what the labeler takes as present and as uncertain: as CheXpert's labeler; as it, with any
            borderline finding as uncertain; or as people who index reports, for whom a probable finding is present.
    """
    from medvl.eval.report_generation.evaluate import evaluate_reports
    from medvl.eval.report_generation.page import write_report_page

    if (checkpoint is None) == (predictions is None):
        raise ConfigError("give exactly one of --checkpoint and --predictions", "conflict", field="checkpoint")
    output = shared.folder(checkpoint or predictions, "report_generation")
    if checkpoint is None:
        assert predictions is not None
        given = _from_file(predictions, data, output, sections)
    else:
        given = _from_checkpoint(checkpoint, data, output, shared, decoding, sections, phantom_truth, conventions)
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
    publish_result(result, given.folder, page, given.name, given.data, result.table(), options=shared)


def _from_file(predictions: Path, data: Path | None, output: OutputFolder, sections: tuple[str, ...]) -> _Reports:
    from medvl.eval.core.open import open_source
    from medvl.eval.report_generation.read_reports import read_reports, references_of

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
    return {deid.image(row["dicom_id"]): row["labels"] for row in read_truth(folder) if "dicom_id" in row}
