"""`medvl eval vqa`: visual question answering by a checkpoint, or by a file of predictions."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from medvl.cli.eval.options import RunOptions, publish_result
from medvl.common.files import sha256
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.publish import WritePage
    from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary
    from medvl.eval.vqa.evaluate import VQAResult
    from medvl.eval.vqa.examples import Explain
    from medvl.eval.vqa.predict import QuestionLoader
    from medvl.eval.vqa.predictions import Predictions
    from medvl.eval.vqa.protocol import VQAProtocol


def vqa(
    data: Path,
    shared: RunOptions,
    *,
    checkpoint: Path | None = None,
    predictions: Path | None = None,
    train: Path | None = None,
    split: str = "test",
    protocol: str = "medvl",
    examples: int = 6,
) -> None:
    """Evaluate visual question answering: accuracy with intervals, baselines without the image, and a page.

    Args:
        data: folder of shards with questions.
        checkpoint: folder of a checkpoint of recipes/vqa_finetune.py.
        predictions: answers of another system instead of a checkpoint: JSON lines with id, answer and optional score.
        train: folder of shards with the training questions, from which the baselines are built, and with whose answers
            the checkpoint's vocabulary is compared; default --data, for corpora with all splits in one folder.
        split: split of the questions.
        protocol: rules for comparing answers; `medvl` is ours, others reproduce published numbers.
        examples: correct and wrong answers on the page, per closed and open question type.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.open import open_source
    from medvl.eval.vqa.evaluate import evaluate_answers
    from medvl.eval.vqa.predict import question_data, questions_beside
    from medvl.eval.vqa.protocol import get_protocol

    rules, shards = get_protocol(protocol), open_source(data)
    if (checkpoint is None) == (predictions is None):
        raise ConfigError("give exactly one of --checkpoint and --predictions", "conflict", field="checkpoint")
    output = shared.folder(checkpoint or predictions, "vqa")
    same_folder = train is None or train.resolve() == data.resolve()
    questions = question_data([shards] if train is None or same_folder else [ShardSource(train), shards])
    folder = output.settle(questions=questions.fingerprint)
    if checkpoint is not None:
        answers = _from_checkpoint(checkpoint, shards, split, rules, shared)
    else:
        assert predictions is not None
        answers = _from_file(predictions)
    result = evaluate_answers(
        questions,
        answers.predictions,
        protocol=rules,
        split=split,
        vocabulary=answers.vocabulary,
        elsewhere=questions_beside([data] if train is None else [train, data]),
        resamples=shared.resamples,
        inputs=answers.inputs,
    )
    page = _page(result, answers, shards, split, examples)
    publish_result(
        result,
        folder,
        page,
        answers.name,
        shards.manifest,
        result.table(),
        options=shared,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """Predictions and their origin."""

    predictions: "Predictions"
    name: str
    inputs: Mapping[str, str]
    vocabulary: "AnswerVocabulary | Literal['protocol'] | None" = "protocol"
    """Answers of the model; None if it generates them, "protocol" if they are unknown."""
    explain: "Explain | None" = None


def _from_checkpoint(
    checkpoint: Path, shards: "ShardSource", split: str, rules: "VQAProtocol", shared: RunOptions
) -> _Answers:
    from medvl.data.loading.vqa_source import QuestionSource
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.vqa.explain import explain
    from medvl.eval.vqa.predict import answer_questions, check_answer_types, model_vocabulary
    from medvl.models import VQA

    check_answer_types(rules)
    shards = open_source(shards.folder, [checkpoint])
    model = load_model(checkpoint, shared.device)
    if not isinstance(model, VQA):
        raise unsupported_model(checkpoint, model, "fine-tune it with recipes/vqa_finetune.py")
    source = QuestionSource(shards, split, model.config.answers, rules.normalize)
    loader = open_for_evaluation(
        source, model.transform, model.tokenizer, batch=shared.batch, workers=shared.workers, sections=("question",)
    )
    return _Answers(
        predictions=answer_questions(model, cast("QuestionLoader", loader)),
        name=f"{model.fusion_model.name} ({checkpoint})",
        inputs={"checkpoint": checkpoint_sha256(checkpoint)},
        vocabulary=model_vocabulary(model, rules),
        explain=functools.partial(explain, model, source),
    )


def _from_file(predictions: Path) -> _Answers:
    from medvl.eval.vqa.predictions import read_predictions

    return _Answers(
        predictions=read_predictions(predictions),
        name=str(predictions),
        inputs={"predictions": sha256(predictions)},
    )


def _page(result: "VQAResult", answers: _Answers, shards: "ShardSource", split: str, examples: int) -> "WritePage":
    from medvl.data.loading.vqa_source import questions_in_split
    from medvl.eval.vqa.page import write_vqa_page

    positions = {entry.question.id: entry.image for entry in questions_in_split(shards, split)}
    return functools.partial(
        write_vqa_page,
        result,
        pixels=lambda name: shards.pixels(positions[name], color=True),
        explain=answers.explain,
        examples=examples,
    )
