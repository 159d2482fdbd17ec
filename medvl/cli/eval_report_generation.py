"""`medvl eval report-generation`: reports generated from images."""

import dataclasses
from typing import Literal

from medvl.cli.eval_common import SmallBatchOptions, publish_result


def report_generation(
    shared: SmallBatchOptions,
    *,
    sections: tuple[str, ...] = ("findings", "impression"),
    beams: int = 1,
    max_tokens: int | None = None,
    length_penalty: float = 0.0,
    samples: int = 0,
    seed: int = 0,
    uncertain: Literal["negative", "positive"] = "negative",
) -> None:
    """Evaluate report generation: n-gram overlap and clinical F1 of generated reports against the references.

    The checkpoint is a MedViLL trained with objective "report".

    Args:
        sections: sections of the references; those that the model was trained to generate.
        beams: beams of the search; 1 is greedy.
        max_tokens: maximum length of a report; default that of training.
        length_penalty: above 0 favours longer reports.
        samples: reports sampled per image, of which the one whose findings agree best with the others is kept; 0 uses
            beam search, which prefers "no abnormality" because it has the fewest paraphrases.
        seed: seed of sampling.
        uncertain: label of findings that a report mentions as uncertain.
    """
    from medvl.eval.core.full_pass import input_hashes
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.report_generation.evaluate import evaluate_reports
    from medvl.eval.report_generation.generate import ReportGenerator, generate_reports
    from medvl.models.text_decoding import Decoding

    decoding = Decoding(beams=beams, max_tokens=max_tokens, length_penalty=length_penalty, samples=samples, seed=seed)
    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, ReportGenerator):
        raise unsupported_model(shared.checkpoint, model, "give the checkpoint of a MedViLL")
    source = open_source(shared.data, [shared.checkpoint])
    loader = open_for_evaluation(source, model.transform, model.tokenizer, batch=shared.batch, workers=shared.workers)
    reports = generate_reports(model, loader, sections=sections, decoding=decoding)
    result = evaluate_reports(
        reports,
        uncertain=uncertain,
        resamples=shared.resamples,
        config={"sections": list(sections), "decoding": dataclasses.asdict(decoding), "model": model.name},
        inputs=input_hashes(shared.checkpoint, manifest=loader),
        details={"without_reference": len(source) - len(reports), "unreadable": dict(loader.skipped)},
    )
    folder = shared.folder(shared.checkpoint, "report_generation")
    publish_result(result, folder, None, model.name, source.manifest, result.table())
