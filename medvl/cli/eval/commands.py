"""Table of the `medvl eval` commands."""

from collections.abc import Callable
from typing import Any

from medvl.cli.eval import (
    calibrate,
    change,
    classify,
    dense,
    grounding,
    matching,
    probe,
    report_generation,
    retrieval,
    retrieval_by_class,
    text,
    vqa,
    zero_shot,
    zero_shot_masks,
)

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
    "text": text.text,
    "report-generation": report_generation.report_generation,
}
"""Name after `medvl eval` -> function, in the order of the help."""
