"""Evaluators: what a checkpoint is worth, with intervals.

    scores, labels, policy -> metric rows -> results.json, a table, a page

`stats` and `metrics` hold the numbers, `policies` what uncertain and missing labels mean, `prompts` the sentences;
`zeroshot`, `retrieval`, `vqa` and `generation` are protocols on top of them; `results` and `page` write down what they
find.
Everything is imported on first use: the statistics need numpy only.
"""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.eval.classification.evaluate import ClassifyEval as ClassifyEval
    from medvl.eval.classification.evaluate import classify as classify
    from medvl.eval.classification.label_policy import LabelPolicy as LabelPolicy
    from medvl.eval.core.bootstrap import bootstrap_auroc as bootstrap_auroc
    from medvl.eval.core.bootstrap import bootstrap_average_precision as bootstrap_average_precision
    from medvl.eval.core.bootstrap import bootstrap_metric as bootstrap_metric
    from medvl.eval.core.metrics import choose_threshold as choose_threshold
    from medvl.eval.core.results import MetricRow as MetricRow
    from medvl.eval.core.results import Results as Results
    from medvl.eval.core.results import format_table as format_table
    from medvl.eval.core.results import read_results as read_results
    from medvl.eval.core.results import write_results as write_results
    from medvl.eval.dense.detection import DetectionEval as DetectionEval
    from medvl.eval.dense.detection import box_detection as box_detection
    from medvl.eval.dense.detection_page import write_detection_page as write_detection_page
    from medvl.eval.dense.segmentation import SegmentationEval as SegmentationEval
    from medvl.eval.dense.segmentation import mask_segmentation as mask_segmentation
    from medvl.eval.dense.segmentation_page import write_segmentation_page as write_segmentation_page
    from medvl.eval.grounding.evaluate import phrase_grounding as phrase_grounding
    from medvl.eval.grounding.metrics import MapRules as MapRules
    from medvl.eval.grounding.page import write_grounding_page as write_grounding_page
    from medvl.eval.html.page import write_page as write_page
    from medvl.eval.probing.evaluate import linear_probe as linear_probe
    from medvl.eval.probing.page import write_probe_page as write_probe_page
    from medvl.eval.report_generation.evaluate import GeneratedReport as GeneratedReport
    from medvl.eval.report_generation.evaluate import evaluate_reports as evaluate_reports
    from medvl.eval.report_generation.generate import ReportEval as ReportEval
    from medvl.eval.report_generation.generate import generate_reports as generate_reports
    from medvl.eval.retrieval.by_class import class_retrieval as class_retrieval
    from medvl.eval.retrieval.by_class import image_retrieval as image_retrieval
    from medvl.eval.retrieval.candidate_lists import RetrievalList as RetrievalList
    from medvl.eval.retrieval.image_text import RetrievalEval as RetrievalEval
    from medvl.eval.retrieval.image_text import image_text_retrieval as image_text_retrieval
    from medvl.eval.retrieval.image_text_page import write_retrieval_page as write_retrieval_page
    from medvl.eval.retrieval.rerank import reranked_retrieval as reranked_retrieval
    from medvl.eval.vqa.answer_normalization import normalize_answer as normalize_answer
    from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary as AnswerVocabulary
    from medvl.eval.vqa.evaluate import evaluate_answers as evaluate_answers
    from medvl.eval.vqa.predict import AnswerEval as AnswerEval
    from medvl.eval.vqa.predict import answer_questions as answer_questions
    from medvl.eval.vqa.predict import read_answer_vocabulary as read_answer_vocabulary
    from medvl.eval.vqa.protocol import VQAProtocol as VQAProtocol
    from medvl.eval.vqa.protocol import get_protocol as get_protocol
    from medvl.eval.vqa.question_set import VQAData as VQAData
    from medvl.eval.zero_shot_classification.evaluate import ZeroShotEval as ZeroShotEval
    from medvl.eval.zero_shot_classification.evaluate import zero_shot as zero_shot
    from medvl.eval.zero_shot_classification.page import write_zero_shot_page as write_zero_shot_page
    from medvl.eval.zero_shot_classification.prompts import PromptSet as PromptSet
    from medvl.eval.zero_shot_classification.prompts import list_prompts as list_prompts
    from medvl.eval.zero_shot_classification.prompts import load_prompts as load_prompts

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".classification.evaluate": ["ClassifyEval", "classify"],
        ".classification.label_policy": ["LabelPolicy"],
        ".core.bootstrap": ["bootstrap_auroc", "bootstrap_average_precision", "bootstrap_metric"],
        ".core.metrics": ["choose_threshold"],
        ".core.results": ["MetricRow", "Results", "format_table", "read_results", "write_results"],
        ".dense.detection": ["DetectionEval", "box_detection"],
        ".dense.detection_page": ["write_detection_page"],
        ".dense.segmentation": ["SegmentationEval", "mask_segmentation"],
        ".dense.segmentation_page": ["write_segmentation_page"],
        ".grounding.evaluate": ["phrase_grounding"],
        ".grounding.metrics": ["MapRules"],
        ".grounding.page": ["write_grounding_page"],
        ".html.page": ["write_page"],
        ".probing.evaluate": ["linear_probe"],
        ".probing.page": ["write_probe_page"],
        ".report_generation.evaluate": ["GeneratedReport", "evaluate_reports"],
        ".report_generation.generate": ["ReportEval", "generate_reports"],
        ".retrieval.by_class": ["class_retrieval", "image_retrieval"],
        ".retrieval.candidate_lists": ["RetrievalList"],
        ".retrieval.image_text": ["RetrievalEval", "image_text_retrieval"],
        ".retrieval.image_text_page": ["write_retrieval_page"],
        ".retrieval.rerank": ["reranked_retrieval"],
        ".vqa.answer_normalization": ["normalize_answer"],
        ".vqa.answer_vocabulary": ["AnswerVocabulary"],
        ".vqa.evaluate": ["evaluate_answers"],
        ".vqa.predict": ["AnswerEval", "answer_questions", "read_answer_vocabulary"],
        ".vqa.protocol": ["VQAProtocol", "get_protocol"],
        ".vqa.question_set": ["VQAData"],
        ".zero_shot_classification.evaluate": ["ZeroShotEval", "zero_shot"],
        ".zero_shot_classification.page": ["write_zero_shot_page"],
        ".zero_shot_classification.prompts": ["PromptSet", "list_prompts", "load_prompts"],
    },
)
