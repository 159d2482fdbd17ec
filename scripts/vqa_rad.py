"""Evaluate predictions on VQA-RAD, next to baselines without images.

    python scripts/vqa_rad.py --root vqa_rad                              # baselines only
    python scripts/vqa_rad.py --root vqa_rad --predictions answers.jsonl  # a model beside them
    python scripts/vqa_rad.py --root vqa_rad --split image-disjoint
    python scripts/vqa_rad.py --root vqa_rad --predictions answers.jsonl --published-protocols

The folder holds either form of the release; data_cards/vqa-rad.md describes how to get it.
Predictions are JSON lines with "id" (qid) and "answer". `--published-protocols` also evaluates them
by the protocols of published numbers, each listed with its flaw: such numbers are comparable only
to numbers of the same protocol.
"""

import argparse
from collections.abc import Iterable

from vqa_corpora import parser_of, run_script

from medvl.data import Deidentifier
from medvl.data.corpora.questions import vqa_rad
from medvl.schema import Sample


def read(options: argparse.Namespace, deid: Deidentifier) -> Iterable[Sample]:
    """Return the images with their questions."""
    return vqa_rad.VQARAD(root=options.root, split=options.split).plan(deid).iter_samples()


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument(
        "--split", choices=vqa_rad.SPLITS, default="official", help="default: official"
    )
    print(run_script(parser.parse_args(), read))
