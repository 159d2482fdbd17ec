"""`medvl eval` commands on language: masked prediction, text tasks and questions."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from medvl.cli.eval.options import EvalOptions, RunOptions, publish_result
from medvl.common.files import sha256
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.results import WritePage
    from medvl.eval.text_tasks.evaluate import EvaluatedEncoder, TextTaskOptions
    from medvl.eval.vqa.evaluate import VQAResult
    from medvl.eval.vqa.examples import Explain
    from medvl.eval.vqa.predictions import Predictions, QuestionLoader
    from medvl.eval.vqa.protocol import AnswerVocabulary, VQAProtocol


# `medvl eval masked-prediction`: words of report sentences that a language model fills in.


def masked_prediction(
    shared: EvalOptions,
    *,
    sections: tuple[str, ...] = ("findings", "impression"),
    limit: int | None = None,
    examples: int = 6,
) -> None:
    """Evaluate a language model on report sentences: findings, sides, severities and negations are
    hidden.

    The checkpoint is one of recipes/pubmedbert.py, bioalbert.py or continue_bert.py, or imported
    with its head (`medvl import bert_mlm`); the shards have texts.

    Args:
        sections: sections of the reports; for a report without any of them, the sections that
            describe the image.
        limit: maximum number of distinct sentences, from the start; default all.
        examples: wrong words of each kind on the page; 0 for a page without sentences.
    """
    from medvl.eval.core.open import load_model, open_source, unsupported_model
    from medvl.eval.masked_prediction import (
        evaluate_masked_prediction,
        write_masked_prediction_page,
    )
    from medvl.models.language.base import LanguageModel

    output = shared.folder(shared.checkpoint, "masked_prediction")
    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, LanguageModel):
        raise unsupported_model(
            shared.checkpoint, model, "give a language model with a head for masked words"
        )
    source = open_source(shared.data, [shared.checkpoint])
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate_masked_prediction(
        model,
        source,
        sections=sections,
        limit=limit,
        batch=shared.batch,
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    page = functools.partial(write_masked_prediction_page, result, examples=examples)
    publish_result(
        result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared
    )


# `medvl eval text`: a text encoder on BLURB and clinical sentence tasks, by fine-tuning.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoderOptions:
    """The text encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with a text encoder"""
    random_weights: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of a text encoder, or a folder in Hugging Face's layout"""
    tokenizer: Path | None = None
    """folder of the vocabulary of --encoder"""
    text_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default
    random ones
    """
    text_arguments: Mapping[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    """arguments of --encoder, such as num_hidden_layers 3 hidden_size 192"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Grid of fine-tuning settings, of which the best one on the dev split is used, and the
    input of the head.
    """

    lrs: tuple[float, ...] = (1e-5, 3e-5, 5e-5)
    """learning rates"""
    batches: tuple[int, ...] = (16, 32)
    """batch sizes"""
    epochs: tuple[int, ...] = (20,)
    """numbers of epochs"""
    seeds: int | None = None
    """fine-tunings with the chosen setting; default as in the paper: ten for BIOSSES, PubMedQA,
    BioASQ, else five
    """
    relation_form: Literal["dummies", "markers", "original"] = "dummies"
    """form of the two mentions in the text of a relation"""
    relation_pool: Literal["first", "mentions", "starts"] = "first"
    """input of the head for a relation: the first token, both mentions, or their first tokens"""
    train_limit: int | None = None
    """maximum number of training examples, from the start; default all"""
    bf16: bool = False
    """use 16-bit matrix products"""

    def settings(self, resamples: int) -> "TextTaskOptions":
        """Return the settings of the evaluation."""
        import torch

        from medvl.eval.text_tasks.evaluate import TextTaskOptions
        from medvl.eval.text_tasks.finetune import FinetuneGrid

        return TextTaskOptions(
            grid=FinetuneGrid(lrs=self.lrs, batches=self.batches, epochs=self.epochs),
            seeds=self.seeds,
            relation_form=self.relation_form,
            relation_pool=self.relation_pool,
            train_limit=self.train_limit,
            autocast=torch.bfloat16 if self.bf16 else None,
            resamples=resamples,
        )


def text(
    data: Path,
    text: TextEncoderOptions,
    tuning: FinetuneOptions,
    *,
    task: tuple[str, ...] = ("all",),
    out: Path | None = None,
    replace: bool = False,
    compare_random: bool = False,
    examples: int = 5,
    resamples: int = 1000,
    device: str = "auto",
    all: bool = False,
) -> None:
    """Evaluate a text encoder by fine-tuning on BLURB's tasks, MedNLI, RadNLI and sentence
    similarity.

    Learning rate, batch size and epochs are chosen on the dev split; every score is printed beside
    baselines without an encoder. data_cards/blurb.md lists the files of each task.

    Args:
        data: folder with a folder for each task.
        task: names of tasks; default all whose folder exists, of which incomplete ones are listed
            and skipped.
        out: folder for the output files; default RUN/eval/STEP/text, or CHECKPOINT/eval/text
            outside of a run.
        replace: replace results of another checkpoint in the output folder.
        compare_random: also fine-tune the same encoder from random weights, with paired
            differences.
        examples: mistakes of each task on the page; 0 for a page without texts.
        resamples: bootstrap resamples.
        device: auto, cpu or cuda.
        all: print all rows; by default, those that fit on one screen.
    """
    from medvl.eval.core.open import resolve_device
    from medvl.eval.text_tasks.evaluate import complete_tasks, evaluate_text_tasks
    from medvl.eval.text_tasks.page import write_text_page

    options = tuning.settings(resamples)
    names = task
    if task == ("all",):
        complete, left_out = complete_tasks(data, options)
        names = tuple(complete)
        for reason in left_out.values():
            print(f"Left out: {reason}", flush=True)
    if not names:
        raise ConfigError(
            f"{data} has no complete task; see data_cards/blurb.md", "not_found", field="data"
        )
    outputs = RunOptions(out=out, replace=replace, all=all)
    output = outputs.folder(
        text.checkpoint, "text_random" if text.random_weights else "text", hashed=False
    )
    folder = output.settle()
    encoder = _open_encoder(text, random=text.random_weights)
    other = _open_encoder(text, random=True) if compare_random else None
    where = resolve_device(device)
    result = evaluate_text_tasks(
        encoder,
        data,
        names,
        options,
        other=other,
        device=where,
        report=functools.partial(print, flush=True),
    )
    page = functools.partial(write_text_page, result, examples=examples)
    publish_result(result, folder, page, encoder.name, str(data.name), options=outputs)


def _open_encoder(options: TextEncoderOptions, *, random: bool) -> "EvaluatedEncoder":
    from medvl.eval.text_tasks.evaluate import encoder_by_name, encoder_of_checkpoint

    if (options.checkpoint is None) == (options.encoder is None):
        message = "expected --checkpoint or --encoder; give exactly one"
        raise ConfigError(message, "conflict", field="checkpoint")
    if options.checkpoint is not None:
        return encoder_of_checkpoint(options.checkpoint, random=random)
    if options.encoder is None or options.tokenizer is None:
        raise ConfigError(
            "--encoder needs --tokenizer, the folder of its vocabulary",
            "missing",
            field="tokenizer",
        )
    arguments: dict[str, Any] = dict(options.text_arguments)
    weights = None if random else options.text_weights
    return encoder_by_name(options.encoder, options.tokenizer, weights, arguments)


# `medvl eval vqa`: visual question answering by a checkpoint, or by a file of predictions.


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
    """Evaluate visual question answering: accuracy with intervals, baselines without the image, and
    a page.

    Args:
        data: folder of shards with questions.
        checkpoint: folder of a checkpoint of recipes/vqa_finetune.py.
        predictions: answers of another system instead of a checkpoint: JSON lines with id, answer
            and optional score.
        train: folder of shards with the training questions, from which the baselines are built, and
            with whose answers the checkpoint's vocabulary is compared; default --data, for corpora
            with all splits in one folder.
        split: split of the questions.
        protocol: rules for comparing answers; `medvl` is ours, others reproduce published numbers.
        examples: correct and wrong answers on the page, per closed and open question type.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.open import open_source
    from medvl.eval.vqa.evaluate import evaluate_answers
    from medvl.eval.vqa.predictions import question_data, questions_beside
    from medvl.eval.vqa.protocol import get_protocol

    rules = get_protocol(protocol)
    shards = open_source(data)
    if (checkpoint is None) == (predictions is None):
        raise ConfigError(
            "give exactly one of --checkpoint and --predictions", "conflict", field="checkpoint"
        )
    output = shared.folder(checkpoint or predictions, "vqa")
    same_folder = train is None or train.resolve() == data.resolve()
    questions = question_data(
        [shards] if train is None or same_folder else [ShardSource(train), shards]
    )
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
    from medvl.data.loading.studies import QuestionSource
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.vqa.examples import explain
    from medvl.eval.vqa.predictions import answer_questions, check_answer_types, model_vocabulary
    from medvl.models import VQA

    check_answer_types(rules)
    shards = open_source(shards.folder, [checkpoint])
    model = load_model(checkpoint, shared.device)
    if not isinstance(model, VQA):
        raise unsupported_model(checkpoint, model, "fine-tune it with recipes/vqa_finetune.py")
    source = QuestionSource(shards, split, model.config.answers, rules.normalize)
    loader = open_for_evaluation(
        source,
        model.transform,
        model.tokenizer,
        batch=shared.batch,
        workers=shared.workers,
        sections=("question",),
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


def _page(
    result: "VQAResult", answers: _Answers, shards: "ShardSource", split: str, examples: int
) -> "WritePage":
    from medvl.data.loading.studies import questions_in_split
    from medvl.eval.vqa.page import write_vqa_page

    positions = {entry.question.id: entry.image for entry in questions_in_split(shards, split)}
    return functools.partial(
        write_vqa_page,
        result,
        pixels=lambda name: shards.pixels(positions[name], color=True),
        explain=answers.explain,
        examples=examples,
    )
