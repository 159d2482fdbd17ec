"""Shared parts of the scripts that evaluate predictions on VQA corpora: options, evaluation,
output.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data import Deidentifier, default_salt_file, questions_of, read_pixels
from medvl.errors import MedvlError
from medvl.eval import (
    PROTOCOLS,
    PageHeader,
    VQAData,
    evaluate_answers,
    published_protocols_table,
    read_predictions,
    write_results,
    write_vqa_page,
)
from medvl.schema import Sample

Pixels = Callable[[str], NDArray[np.uint8]]
"""Question id -> its image."""
Read = Callable[[argparse.Namespace, Deidentifier], Iterable[Sample]]
"""(options, deidentifier) -> samples of the corpus."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all corpora share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="folder of the questions and the images"
    )
    parser.add_argument(
        "--part", default="test", help="split of the evaluated questions (default: test)"
    )
    parser.add_argument(
        "--predictions", type=Path, help="JSON lines with id and answer; default: baselines only"
    )
    parser.add_argument(
        "--protocol", choices=list(PROTOCOLS), default="medvl", help="default: medvl"
    )
    parser.add_argument(
        "--published-protocols",
        action="store_true",
        help="also evaluate by the protocols of published numbers",
    )
    parser.add_argument(
        "--resamples", type=int, default=1000, help="bootstrap resamples (default: 1000)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for results.json, predictions.jsonl and index.html; default: no files",
    )
    return parser


def report(data: VQAData, options: argparse.Namespace, pixels: Pixels | None = None) -> str:
    """Evaluate, write files if there is an `--out`, and return the text to print. `pixels` are for
    the page.

    Raises EvaluationError.
    """
    predictions = None if options.predictions is None else read_predictions(options.predictions)
    digest = (
        None
        if options.predictions is None
        else hashlib.sha256(options.predictions.read_bytes()).hexdigest()
    )
    result = evaluate_answers(
        data,
        predictions,
        protocol=options.protocol,
        split=options.part,
        resamples=options.resamples,
        inputs={"predictions": digest},
    )
    details, size = result.results.details, result.results.config["vocabulary_size"]
    texts = [
        f"{data.name}, {data.split_id} split, {options.part}, protocol {options.protocol}: "
        f"{details['questions']} "
        f"questions on {details['images']} images, {size or 'no'} answers in the vocabulary",
        result.table(),
    ]
    if options.published_protocols:
        texts.append(published_protocols_table(data, predictions, split=options.part))
    if options.out is not None:
        paths = write_results(result.results, options.out, result.predictions())
        name = "" if predictions is None else str(options.predictions)
        header = PageHeader(model=name, data=data.name)
        paths.append(write_vqa_page(result, options.out / "index.html", header, pixels=pixels))
        texts.append("\n".join(map(str, paths)))
    return "\n\n".join(texts)


def run_script(options: argparse.Namespace, read: Read) -> str:
    """Return the text that a script prints; on bad input, exit with status 1 and a one-line
    error.
    """
    try:
        deid = Deidentifier.from_file(
            default_salt_file(), create="MEDVL_SALT_FILE" not in os.environ
        )
        samples = list(read(options, deid))
        return report(VQAData.from_samples(samples), options, _pixels(samples))
    except MedvlError as error:
        sys.exit(f"error: {error}")


def _pixels(samples: Sequence[Sample]) -> Pixels:
    """Return a function that reads the image of a question from the files of the corpus."""
    sample_of = {question.id: sample for sample in samples for question in questions_of(sample)}
    return lambda question_id: read_pixels(sample_of[question_id].image, color=True)[0]
