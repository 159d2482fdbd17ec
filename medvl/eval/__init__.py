"""Evaluators: what a checkpoint is worth, with intervals.

    scores, labels, policy -> metric rows -> results.json, a table, a page

`stats` and `metrics` hold the numbers, `policies` what uncertain and missing labels mean, `prompts` the sentences;
`zeroshot`, `retrieval`, `vqa` and `generation` are protocols on top of them; `results` and `page` write down what they
find.
Everything is imported on first use: the statistics need numpy only.
"""

import importlib
from typing import Any

_HOME = {
    "AnswerEval": "vqa.answer",
    "AnswerVocabulary": "vqa.vocabulary",
    "ClassifyEval": "classification",
    "DetectionEval": "detection",
    "LabelPolicy": "policies",
    "MapRules": "grounding_metrics",
    "MetricRow": "results",
    "PromptSet": "prompts",
    "ReportEval": "generation.write",
    "RetrievalEval": "retrieval",
    "RetrievalList": "retrieval_lists",
    "SegmentationEval": "segmentation",
    "VQAData": "vqa.questions",
    "VQAProtocol": "vqa.protocol",
    "WrittenReport": "generation.judge",
    "ZeroShotEval": "zeroshot",
    "answer_questions": "vqa.answer",
    "answers_in": "vqa.answer",
    "bootstrap_auroc": "stats",
    "bootstrap_average_precision": "stats",
    "bootstrap_metric": "stats",
    "box_detection": "detection",
    "choose_threshold": "metrics",
    "class_retrieval": "retrieval_classes",
    "classify": "classification",
    "format_table": "results",
    "get_protocol": "vqa.protocol",
    "image_retrieval": "retrieval_classes",
    "image_text_retrieval": "retrieval",
    "judge_answers": "vqa.judge",
    "judge_reports": "generation.judge",
    "linear_probe": "probe",
    "list_prompts": "prompts",
    "load_prompts": "prompts",
    "normalize_answer": "vqa.normalize",
    "mask_segmentation": "segmentation",
    "phrase_grounding": "grounding",
    "read_results": "results",
    "reranked_retrieval": "rerank",
    "write_detection_page": "dense_page",
    "write_grounding_page": "grounding_page",
    "write_page": "page",
    "write_probe_page": "probe_page",
    "write_reports": "generation.write",
    "write_results": "results",
    "write_retrieval_page": "retrieval_view_page",
    "write_segmentation_page": "dense_page",
    "write_zero_shot_page": "zeroshot_page",
    "zero_shot": "zeroshot",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"medvl.eval.{_HOME[name]}"), name)
    raise AttributeError(f"module 'medvl.eval' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
