"""Evaluation of models: metrics with bootstrap intervals, results.json, tables and HTML pages.

    scores, labels, policy -> metric rows -> results.json, a table, a page

`core` has metrics, bootstrap and results, `html` the pages. Each task has its own package with the
protocol in the docstring of its evaluator: `zero_shot_classification`, `classification`, `probing`,
`retrieval`, `matching`, `grounding`, `change`, `dense` (detection and segmentation), `vqa`,
`report_generation`, `generation` (of images), `robustness`, `text_tasks`, `text_retrieval` and
`masked_prediction`; `compare` compares results of several models, `published` has numbers of
papers. Submodules are imported on first use: the statistics need numpy only.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.eval.change.evaluation import write_change_page as write_change_page
    from medvl.eval.change.protocol import (
        ChangeEval as ChangeEval,
        change_classification as change_classification,
        load_change_prompts as load_change_prompts,
    )
    from medvl.eval.classification.protocol import (
        ClassifyEval as ClassifyEval,
        classify as classify,
    )
    from medvl.eval.classification.scored_images import LabelPolicy as LabelPolicy
    from medvl.eval.core.metric_rows import (
        MetricGroup as MetricGroup,
        mean_metrics as mean_metrics,
    )
    from medvl.eval.core.metrics import (
        bootstrap as bootstrap,
        bootstrap_auroc as bootstrap_auroc,
        bootstrap_average_precision as bootstrap_average_precision,
        bootstrap_metric as bootstrap_metric,
        choose_threshold as choose_threshold,
    )
    from medvl.eval.core.open import (
        RunOptions as RunOptions,
        Setup as Setup,
        load_ensemble as load_ensemble,
        open_for_evaluation as open_for_evaluation,
    )
    from medvl.eval.core.results import (
        LineFields as LineFields,
        MetricRow as MetricRow,
        PageHeader as PageHeader,
        Results as Results,
        default_folder as default_folder,
        format_table as format_table,
        read_results as read_results,
        write_results as write_results,
    )
    from medvl.eval.dense.detection import (
        DetectionEval as DetectionEval,
        box_detection as box_detection,
    )
    from medvl.eval.dense.evaluation import (
        write_detection_page as write_detection_page,
        write_segmentation_page as write_segmentation_page,
    )
    from medvl.eval.dense.segmentation import (
        SegmentationEval as SegmentationEval,
        mask_segmentation as mask_segmentation,
    )
    from medvl.eval.evaluation import (
        Column as Column,
        Evaluation as Evaluation,
        LineResult as LineResult,
        ModelEvaluation as ModelEvaluation,
        Outcome as Outcome,
        Task as Task,
        Trial as Trial,
        run_evaluation as run_evaluation,
    )
    from medvl.eval.generation.distances import (
        frechet_distance as frechet_distance,
        kernel_distance as kernel_distance,
        manifolds as manifolds,
    )
    from medvl.eval.generation.inputs import (
        GeneratedSource as GeneratedSource,
        RealData as RealData,
    )
    from medvl.eval.generation.page import write_generation_page as write_generation_page
    from medvl.eval.generation.protocol import (
        GenerationModels as GenerationModels,
        GenerationOptions as GenerationOptions,
        evaluate_generation as evaluate_generation,
    )
    from medvl.eval.grounding.evaluation import write_grounding_page as write_grounding_page
    from medvl.eval.grounding.heatmaps import MapRules as MapRules
    from medvl.eval.grounding.protocol import phrase_grounding as phrase_grounding
    from medvl.eval.html.page import (
        Page as Page,
        write_page as write_page,
    )
    from medvl.eval.html.tables import (
        Cell as Cell,
        Table as Table,
        metric_cell as metric_cell,
    )
    from medvl.eval.masked_prediction import (
        evaluate_masked_prediction as evaluate_masked_prediction,
        write_masked_prediction_page as write_masked_prediction_page,
    )
    from medvl.eval.matching import (
        image_text_matching as image_text_matching,
        write_matching_page as write_matching_page,
    )
    from medvl.eval.metric_classes import (
        LabelMetrics as LabelMetrics,
        RetrievalMetrics as RetrievalMetrics,
    )
    from medvl.eval.probing.evaluation import (
        write_probe_page as write_probe_page,
    )
    from medvl.eval.probing.features import (
        ProbedEncoder as ProbedEncoder,
        encode_features as encode_features,
    )
    from medvl.eval.probing.neighbours import (
        evaluate_neighbours as evaluate_neighbours,
        write_neighbours_page as write_neighbours_page,
    )
    from medvl.eval.probing.protocol import (
        FittedProbe as FittedProbe,
        linear_probe as linear_probe,
        ordinal_table as ordinal_table,
    )
    from medvl.eval.published.numbers import (
        PublishedNumber as PublishedNumber,
        published_numbers as published_numbers,
    )
    from medvl.eval.registry import (
        evaluation_class as evaluation_class,
        list_evaluations as list_evaluations,
        register_evaluation as register_evaluation,
    )
    from medvl.eval.report_generation.evaluation import write_report_page as write_report_page
    from medvl.eval.report_generation.external import radcliq_v1 as radcliq_v1
    from medvl.eval.report_generation.generate import (
        ReportEval as ReportEval,
        generate_by_decoding as generate_by_decoding,
        generate_reports as generate_reports,
    )
    from medvl.eval.report_generation.protocol import (
        GeneratedReport as GeneratedReport,
        evaluate_reports as evaluate_reports,
    )
    from medvl.eval.report_generation.rexrank import (
        read_rexrank as read_rexrank,
        write_rexrank as write_rexrank,
    )
    from medvl.eval.retrieval.by_class import (
        class_retrieval as class_retrieval,
        image_retrieval as image_retrieval,
    )
    from medvl.eval.retrieval.candidate_lists import RetrievalList as RetrievalList
    from medvl.eval.retrieval.evaluation import (
        write_class_retrieval_page as write_class_retrieval_page,
        write_retrieval_page as write_retrieval_page,
    )
    from medvl.eval.retrieval.image_text import (
        RetrievalEval as RetrievalEval,
        image_text_retrieval as image_text_retrieval,
    )
    from medvl.eval.retrieval.rerank import (
        ShortlistModel as ShortlistModel,
        reranked_retrieval as reranked_retrieval,
    )
    from medvl.eval.robustness.evaluation import write_robustness_page as write_robustness_page
    from medvl.eval.robustness.protocol import (
        RobustnessSettings as RobustnessSettings,
        evaluate_robustness as evaluate_robustness,
    )
    from medvl.eval.text_retrieval import (
        evaluate_text_retrieval as evaluate_text_retrieval,
        write_text_retrieval_page as write_text_retrieval_page,
    )
    from medvl.eval.text_tasks.evaluation import write_text_page as write_text_page
    from medvl.eval.text_tasks.finetune import (
        FinetuneGrid as FinetuneGrid,
        FinetuneSettings as FinetuneSettings,
    )
    from medvl.eval.text_tasks.metrics import blurb_score as blurb_score
    from medvl.eval.text_tasks.protocol import (
        EvaluatedEncoder as EvaluatedEncoder,
        TextTaskOptions as TextTaskOptions,
        encoder_by_name as encoder_by_name,
        encoder_of_checkpoint as encoder_of_checkpoint,
        evaluate_text_tasks as evaluate_text_tasks,
    )
    from medvl.eval.vqa.accuracy import (
        evaluate_answers as evaluate_answers,
        published_protocols_table as published_protocols_table,
    )
    from medvl.eval.vqa.evaluation import write_vqa_page as write_vqa_page
    from medvl.eval.vqa.predictions import (
        AnswerEval as AnswerEval,
        Prediction as Prediction,
        VQAData as VQAData,
        answer_questions as answer_questions,
        model_vocabulary as model_vocabulary,
        question_data as question_data,
        read_answer_vocabulary as read_answer_vocabulary,
        read_answered as read_answered,
        read_predictions as read_predictions,
    )
    from medvl.eval.vqa.protocol import (
        PROTOCOLS as PROTOCOLS,
        AnswerVocabulary as AnswerVocabulary,
        VQAProtocol as VQAProtocol,
        get_protocol as get_protocol,
        normalize_answer as normalize_answer,
    )
    from medvl.eval.zero_shot_classification.evaluation import (
        write_zero_shot_page as write_zero_shot_page,
    )
    from medvl.eval.zero_shot_classification.prompts import (
        PromptSet as PromptSet,
        list_prompts as list_prompts,
        load_prompts as load_prompts,
    )
    from medvl.eval.zero_shot_classification.protocol import (
        ZeroShotEval as ZeroShotEval,
        zero_shot as zero_shot,
    )
    from medvl.eval.zero_shot_masks import evaluate_zero_shot_masks as evaluate_zero_shot_masks

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
