"""Table of the `medvl eval` commands, and the ranks that run one."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from medvl.cli.eval import (
    calibrate,
    change,
    classify,
    dense,
    generation,
    grounding,
    masked_prediction,
    matching,
    probe,
    report_generation,
    retrieval,
    retrieval_by_class,
    robustness,
    text,
    vqa,
    zero_shot,
    zero_shot_masks,
)
from medvl.errors import ConfigError

COMMANDS: dict[str, Callable[..., Any]] = {
    "zero-shot": zero_shot.zero_shot,
    "calibrate": calibrate.calibrate,
    "retrieval": retrieval.retrieval,
    "classify": classify.classify,
    "class-retrieval": retrieval_by_class.class_retrieval,
    "make-retrieval-list": retrieval_by_class.make_retrieval_list,
    "grounding": grounding.grounding,
    "matching": matching.matching,
    "change": change.change,
    "detection": dense.detection,
    "segmentation": dense.segmentation,
    "zero-shot-masks": zero_shot_masks.zero_shot_masks,
    "probe": probe.probe,
    "vqa": vqa.vqa,
    "robustness": robustness.robustness,
    "text": text.text,
    "generation": generation.generation,
    "masked-prediction": masked_prediction.masked_prediction,
    "report-generation": report_generation.report_generation,
}
"""Name after `medvl eval` -> function, in the order of the help."""
SHARDED = ("zero-shot", "retrieval", "classify", "probe")
"""Commands that divide the batches among the ranks of torchrun."""


@contextlib.contextmanager
def joined_ranks(name: str) -> Iterator[None]:
    """Join the ranks that torchrun started, for the command of this name; a single process joins none.

    Raises ConfigError where there are several ranks and the command runs on one.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if name not in SHARDED:
        message = f"expected one process for medvl eval {name}, got several; start it without torchrun"
        raise ConfigError(f"{message} (it divides {', '.join(SHARDED)})", "unsupported", field="ranks")
    from medvl.train.parallel.distributed import join

    with join():
        yield
