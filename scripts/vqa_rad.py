"""VQA-RAD: what a model's answers are worth, and what needs no image at all.

    python scripts/vqa_rad.py --root vqa_rad                                  # the baselines alone
    python scripts/vqa_rad.py --root vqa_rad --predictions answers.jsonl      # a model beside them
    python scripts/vqa_rad.py --root vqa_rad --split image-disjoint
    python scripts/vqa_rad.py --root vqa_rad --predictions answers.jsonl --legacy

The folder holds either form of the release; data_cards/vqa-rad.md says how to get it. Predictions are JSON lines with
"id" (qid) and "answer". `--legacy` judges the same answers by the protocols behind published numbers, each with what
is wrong with it: their numbers are not to be compared with anything but themselves.
"""

import argparse
import sys
from pathlib import Path

from medvl.data.corpora import vqa_rad
from medvl.data.deid import Deidentifier, default_salt_file
from medvl.errors import MedvlError
from medvl.eval import VQAData, judge_answers, write_results
from medvl.eval.vqa.legacy import legacy_table
from medvl.eval.vqa.predictions import read_predictions
from medvl.eval.vqa.protocol import PROTOCOL, PROTOCOLS
from medvl.files import sha256


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the questions and the images")
    parser.add_argument("--split", choices=vqa_rad.SPLITS, default="official", help="default: official")
    parser.add_argument("--part", default="test", help="which part of it is judged (default: test)")
    parser.add_argument("--predictions", type=Path, help="JSON lines with id and answer")
    parser.add_argument("--protocol", choices=list(PROTOCOLS), default=PROTOCOL, help=f"default: {PROTOCOL}")
    parser.add_argument("--legacy", action="store_true", help="judge by the protocols of published numbers too")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap over images (default: 1000)")
    parser.add_argument("--out", type=Path, help="gets results.json and predictions.jsonl; default: nothing is written")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Judge, print, write."""
    deid = Deidentifier.from_file(default_salt_file(), create=True)
    samples = vqa_rad.iter_samples(options.root, deid=deid, split=options.split)
    data = VQAData.from_samples(samples, split_id=options.split)
    predictions = None if options.predictions is None else read_predictions(options.predictions)
    result = judge_answers(
        data,
        predictions,
        protocol=options.protocol,
        split=options.part,
        resamples=options.resamples,
        inputs={"predictions": None if options.predictions is None else sha256(options.predictions)},
    )
    details = result.results.details
    size = result.results.config["vocabulary_size"]
    print(f"{data.name}, {options.split} split, {options.part}, protocol {options.protocol}:", end=" ")
    print(f"{details['questions']} questions on {details['images']} images, {size or 'no'} answers in the vocabulary\n")
    print(result.table())
    if options.legacy:
        print(f"\n{legacy_table(data, predictions, split=options.part)}")
    if options.out is not None:
        print()
        for path in write_results(result.results, options.out, result.predictions()):
            print(path)


def main() -> None:
    """Run, and say in one line what is wrong where something is."""
    options = arguments()
    try:
        run(options)
    except MedvlError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
