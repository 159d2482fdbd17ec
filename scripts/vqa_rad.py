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
from collections.abc import Iterable

from medvl.data import Deidentifier
from medvl.data.corpora import vqa_rad
from medvl.eval.vqa.corpus_scripts import parser_of, run_script
from medvl.schema import Sample


def read(options: argparse.Namespace, deid: Deidentifier) -> Iterable[Sample]:
    """The images with their questions."""
    return vqa_rad.plan(options.root, deid, split=options.split).iter_samples()


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--split", choices=vqa_rad.SPLITS, default="official", help="default: official")
    print(run_script(parser.parse_args(), read))
