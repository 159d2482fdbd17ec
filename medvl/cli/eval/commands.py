"""Table of the `medvl eval` commands, and the ranks that run one."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from medvl.cli.eval import classification, images, reports, texts
from medvl.errors import ConfigError

COMMANDS: dict[str, Callable[..., Any]] = {
    "zero-shot": classification.zero_shot,
    "calibrate": classification.calibrate,
    "retrieval": images.retrieval,
    "classify": classification.classify,
    "class-retrieval": images.class_retrieval,
    "make-retrieval-list": images.make_retrieval_list,
    "grounding": images.grounding,
    "matching": images.matching,
    "change": images.change,
    "detection": images.detection,
    "segmentation": images.segmentation,
    "zero-shot-masks": images.zero_shot_masks,
    "probe": classification.probe,
    "vqa": texts.vqa,
    "robustness": classification.robustness,
    "text": texts.text,
    "generation": reports.generation,
    "masked-prediction": texts.masked_prediction,
    "report-generation": reports.report_generation,
}
"""Name after `medvl eval` -> function, in the order of the help."""
SHARDED = ("zero-shot", "retrieval", "classify", "probe")
"""Commands that divide the batches among the ranks of torchrun."""


@contextlib.contextmanager
def joined_ranks(name: str) -> Iterator[None]:
    """Join the ranks that torchrun started, for the command of this name; a single process joins
    none.

    Raises ConfigError where there are several ranks and the command runs on one.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if name not in SHARDED:
        message = (
            f"expected one process for medvl eval {name}, got several; start it without torchrun"
        )
        raise ConfigError(
            f"{message} (it divides {', '.join(SHARDED)})", "unsupported", field="ranks"
        )
    from medvl.train.parallel.distributed import join

    with join():
        yield
