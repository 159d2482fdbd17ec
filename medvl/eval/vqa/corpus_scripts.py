"""From questions and a file of answers to what is printed and written: what the scripts of the VQA corpora share."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from medvl.common.files import sha256
from medvl.data.annotations.questions import questions_of
from medvl.data.images.read import read_pixels
from medvl.data.privacy.deidentify import Deidentifier, default_salt_file
from medvl.errors import MedvlError
from medvl.eval.core.results import write_results
from medvl.eval.vqa.evaluate import evaluate_answers
from medvl.eval.vqa.examples import Pixels
from medvl.eval.vqa.page import write_vqa_page
from medvl.eval.vqa.predictions import read_predictions
from medvl.eval.vqa.protocol import PROTOCOL, PROTOCOLS
from medvl.eval.vqa.published_protocols import published_protocols_table
from medvl.eval.vqa.question_set import VQAData
from medvl.schema import Sample

Read = Callable[[argparse.Namespace, Deidentifier], Iterable[Sample]]
"""(options, de-identifier) -> the samples of the corpus."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that every corpus has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the questions and the images")
    parser.add_argument("--part", default="test", help="which part of the split is judged (default: test)")
    parser.add_argument(
        "--predictions", type=Path, help="JSON lines with id and answer; without it, the baselines alone"
    )
    parser.add_argument("--protocol", choices=list(PROTOCOLS), default=PROTOCOL, help=f"default: {PROTOCOL}")
    parser.add_argument("--legacy", action="store_true", help="judge by the protocols of published numbers too")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over images (default: 1000)")
    parser.add_argument(
        "--out", type=Path, help="gets results.json, predictions.jsonl and index.html; default: nothing is written"
    )
    return parser


def report(data: VQAData, options: argparse.Namespace, pixels: Pixels | None = None) -> str:
    """Judge and, where there is an `--out`, write; the text to print. `pixels` are for the page.

    Raises EvaluationError.
    """
    predictions = None if options.predictions is None else read_predictions(options.predictions)
    result = evaluate_answers(
        data,
        predictions,
        protocol=options.protocol,
        split=options.part,
        resamples=options.resamples,
        inputs={"predictions": None if options.predictions is None else sha256(options.predictions)},
    )
    details, size = result.results.details, result.results.config["vocabulary_size"]
    texts = [
        f"{data.name}, {data.split_id} split, {options.part}, protocol {options.protocol}: {details['questions']} "
        f"questions on {details['images']} images, {size or 'no'} answers in the vocabulary",
        result.table(),
    ]
    if options.legacy:
        texts.append(published_protocols_table(data, predictions, split=options.part))
    if options.out is not None:
        paths = write_results(result.results, options.out, result.predictions())
        name = "" if predictions is None else str(options.predictions)
        paths.append(write_vqa_page(result, options.out / "index.html", model=name, pixels=pixels))
        texts.append("\n".join(map(str, paths)))
    return "\n\n".join(texts)


def run_script(options: argparse.Namespace, read: Read) -> str:
    """What a script has to say; bad input ends it with status 1 and one line that says why."""
    try:
        deid = Deidentifier.from_file(default_salt_file(), create=True)
        samples = list(read(options, deid))
        return report(VQAData.from_samples(samples), options, _pixels(samples))
    except MedvlError as error:
        sys.exit(f"error: {error}")


def _pixels(samples: Sequence[Sample]) -> Pixels:
    """The images of questions, from the files of the corpus."""
    sample_of = {question.id: sample for sample in samples for question in questions_of(sample)}
    return lambda name: read_pixels(sample_of[name], color=True)[0]
