"""SLAKE: what a model's answers are worth, and what needs no image at all.

    python scripts/slake.py --root slake                                      # the baselines alone
    python scripts/slake.py --root slake --predictions answers.jsonl          # a model beside them
    python scripts/slake.py --root slake --language zh

The folder holds the release; data_cards/slake.md says how to get it. Predictions are JSON lines with "id" (qid) and
"answer". `--legacy` judges the same answers by the protocols behind published numbers.
"""

import argparse
from collections.abc import Iterable

from medvl.data import Deidentifier
from medvl.data.corpora import slake
from medvl.eval.vqa.corpus_scripts import parser_of, run_script
from medvl.schema import Sample


def read(options: argparse.Namespace, deid: Deidentifier) -> Iterable[Sample]:
    """The images with their questions."""
    return slake.plan(options.root, deid, language=options.language).iter_samples()


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--language", choices=slake.LANGUAGES, default="en", help="default: en")
    print(run_script(parser.parse_args(), read))
