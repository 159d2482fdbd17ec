"""`medvl eval report-generation`: reports generated from images."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.cli.eval_common import SmallBatchOptions, publish_result

if TYPE_CHECKING:
    from medvl.models.text_decoding import Decoding


def report_generation(
    shared: SmallBatchOptions,
    *,
    sections: tuple[str, ...] = ("findings", "impression"),
    beams: int = 1,
    max_tokens: int | None = None,
    length_penalty: float = 0.0,
    samples: int = 0,
    seed: int = 0,
    phantom_truth: Path | None = None,
    uncertain: Literal["negative", "positive"] = "negative",
) -> None:
    """Evaluate report generation: n-gram overlap and clinical F1 of generated reports against references and labels.

    The checkpoint is a MedViLL trained with objective "report". Greedy search is always evaluated.

    Args:
        sections: sections of the references; those that the model was trained to generate.
        beams: above 1: also evaluate a beam search. It prefers "no abnormality", which has the fewest paraphrases.
        max_tokens: maximum length of a report; default that of training.
        length_penalty: above 0 favours longer reports in the beam search.
        samples: above 0: also sample as many reports per image and evaluate the one whose findings agree best with the
            others. The labeler that selects also reads the findings of the metrics.
        seed: seed of sampling.
        phantom_truth: folder of `medvl phantom mimic-cxr` that the shards are from: compare findings with what its
            images show, not with the labels of its reports.
        uncertain: label of findings that a report mentions as uncertain.
    """
    from medvl.eval.core.full_pass import input_hashes
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.report_generation.evaluate import evaluate_reports
    from medvl.eval.report_generation.generate import ReportGenerator, generate_by_decoding
    from medvl.eval.report_generation.page import write_report_page

    decodings = _decodings(max_tokens, beams, length_penalty, samples, seed)
    labels = None if phantom_truth is None else _truth(phantom_truth)
    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, ReportGenerator):
        raise unsupported_model(shared.checkpoint, model, "give the checkpoint of a MedViLL")
    source = open_source(shared.data, [shared.checkpoint])
    loader = open_for_evaluation(source, model.transform, model.tokenizer, batch=shared.batch, workers=shared.workers)
    generated = generate_by_decoding(model, loader, decodings, sections=sections, labels=labels)
    reports = generated.pop("greedy")
    result = evaluate_reports(
        reports,
        others=generated,
        uncertain=uncertain,
        resamples=shared.resamples,
        config={
            "sections": list(sections),
            "decodings": {name: dataclasses.asdict(decoding) for name, decoding in decodings.items()},
            "labels": "of the data" if phantom_truth is None else "ground truth of the phantom",
            "model": model.name,
        },
        inputs=input_hashes(shared.checkpoint, manifest=loader),
        details={"without_reference": len(source) - len(reports), "unreadable": dict(loader.skipped)},
    )
    folder = shared.folder(shared.checkpoint, "report_generation")
    page = functools.partial(write_report_page, result)
    publish_result(result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, result.table())


def _decodings(
    max_tokens: int | None, beams: int, length_penalty: float, samples: int, seed: int
) -> "dict[str, Decoding]":
    from medvl.models.text_decoding import Decoding

    decodings = {"greedy": Decoding(max_tokens=max_tokens)}
    if beams > 1:
        decodings["beam search"] = Decoding(beams=beams, max_tokens=max_tokens, length_penalty=length_penalty)
    if samples:
        decodings["consensus"] = Decoding(samples=samples, max_tokens=max_tokens, seed=seed)
    return decodings


def _truth(folder: Path) -> dict[str, dict[str, int]]:
    """Return the ground truth of a phantom by sample key, with the default salt."""
    from medvl.cli.shards import deidentifier
    from medvl.phantom import read_truth

    deid = deidentifier(None)
    return {deid.image(row["dicom_id"]): row["labels"] for row in read_truth(folder) if "dicom_id" in row}
