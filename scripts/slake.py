"""Evaluate predictions on SLAKE, next to baselines without images.

    python scripts/slake.py --root slake                              # baselines only
    python scripts/slake.py --root slake --predictions answers.jsonl  # a model and the baselines
    python scripts/slake.py --root slake --language zh

The folder holds the release; data_cards/slake.md describes how to get it. Predictions are JSON
lines with "id" (qid) and "answer". `--published-protocols` also evaluates them by the protocols of
published numbers.
"""

import argparse
from collections.abc import Iterable

from vqa_corpora import parser_of, run_script

from medvl.data import Deidentifier
from medvl.data.corpora.questions import slake
from medvl.schema import Sample


def read(options: argparse.Namespace, deid: Deidentifier) -> Iterable[Sample]:
    """Return the images with their questions."""
    return slake.SLAKE(root=options.root, language=options.language).plan(deid).iter_samples()


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--language", choices=slake.LANGUAGES, default="en", help="default: en")
    print(run_script(parser.parse_args(), read))
