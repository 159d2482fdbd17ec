"""`medvl eval report`: a checkpoint and a folder of shards in, a table and `results.json` out."""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.cli.eval_common import default_folder, load_model, open_shards, print_report


def report(
    checkpoint: Path,
    data: Path,
    *,
    sections: tuple[str, ...] = ("findings", "impression"),
    beams: int = 1,
    max_tokens: int | None = None,
    length_penalty: float = 0.0,
    samples: int = 0,
    seed: int = 0,
    doubt: Literal["negative", "positive"] = "negative",
    out: Path | None = None,
    resamples: int = 1000,
    batch: int = 32,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Report generation: words and findings that written reports share with the references, with intervals.

    Args:
        checkpoint: folder of a checkpoint of a MedViLL that was trained for reports (objective "report").
        data: folder of shards with text, of patients that the model was not trained on.
        sections: of the references, whole; those that the model was trained to write.
        beams: 1 is greedy.
        max_tokens: most tokens of a report; default what the model was trained with.
        length_penalty: above 0 favours longer reports.
        samples: texts drawn for each image, of which the one is kept whose findings agree best with the others'; a
            search, which 0 stands for, prefers "no abnormality" because it is said in fewer ways.
        seed: of the draws.
        doubt: what a finding that a report doubts counts as.
        out: gets results.json and predictions.jsonl; default eval/report in the checkpoint's run.
        resamples: of the bootstrap over patients.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.errors import ConfigError
    from medvl.eval.core.full_pass import input_hashes
    from medvl.eval.core.results import write_results
    from medvl.eval.report_generation.evaluate import judge_reports
    from medvl.eval.report_generation.generate import write_reports
    from medvl.models.text_decoding import Decoding

    decoding = Decoding(beams=beams, max_tokens=max_tokens, length_penalty=length_penalty, samples=samples, seed=seed)
    model = load_model(checkpoint, device)
    if not hasattr(model, "generate"):
        raise ConfigError(f"{checkpoint} is a {model.name} and writes no reports: medvill does")
    loader = open_shards(model, checkpoint, data, batch, workers)
    reports = write_reports(model, loader, sections=sections, decoding=decoding)
    result = judge_reports(
        reports,
        doubt=doubt,
        resamples=resamples,
        config={"sections": list(sections), "decoding": dataclasses.asdict(decoding), "model": model.name},
        inputs=input_hashes(checkpoint, manifest=loader),
        details={"without_reference": len(loader.source) - len(reports), "unreadable": dict(loader.skipped)},
    )
    paths = write_results(result.results, out or default_folder(checkpoint, "report"), result.predictions())
    print_report(result.table(), paths)
