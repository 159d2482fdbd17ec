"""Texts about images: answers to questions, and reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from medvl.data.images.read import ImageInput
from medvl.errors import ConfigError
from medvl.eval.report_generation.generate import ReportWriter, decode_texts
from medvl.inference.models import (
    BATCH,
    AnyImage,
    Images,
    batches,
    is_single,
    make_batch,
    open_model,
    refuse,
    texts_for,
)
from medvl.models import VQA
from medvl.models.base import System, evaluating
from medvl.models.text_decoding import Decoding

CAN_ANSWER = "use a model trained for visual question answering (recipes/vqa_finetune.py)"
CAN_WRITE = "use one trained to write: r2gen, or medvill with its preset for reports"


@overload
def answer(model: System | Path | str, images: ImageInput, questions: str) -> str: ...


@overload
def answer(
    model: System | Path | str, images: ImageInput, questions: list[str] | tuple[str, ...]
) -> list[str]: ...


@overload
def answer(
    model: System | Path | str, images: Images[AnyImage], questions: str | Sequence[str]
) -> list[str]: ...


def answer(
    model: System | Path | str, images: Any, questions: str | Sequence[str]
) -> str | list[str]:
    """Return the likeliest answer to a question about an image; for lists, a list of answers.

    Args:
        model: a VQA model, or what `medvl.load` takes.
        images: one image (`medvl.data.ImageInput`) or a list; with one image, all questions are
            about it.
        questions: one question or a list; one question is asked about every image.

    Raises:
        ConfigError: the model answers no questions, a question is empty, or the numbers do not fit.
        ImageError, DicomError, FileNotFoundError: an image cannot be read.
    """
    system = open_model(model)
    if not isinstance(system, VQA):
        raise refuse(system, "answer questions", CAN_ANSWER)
    listed, asked = texts_for(images, questions, "questions")
    if not all(question.strip() for question in asked):
        raise ConfigError("expected a question, got an empty one", "empty", field="questions")
    answers: list[str] = []
    with evaluating(system):
        for image_BCHW in batches(system, listed):
            answers += system.answer(image_BCHW, asked[len(answers) : len(answers) + BATCH])
    return answers[0] if is_single(images) and isinstance(questions, str) else answers


@overload
def write_report(
    model: System | Path | str, images: ImageInput, *, decoding: Decoding | None = None
) -> str: ...


@overload
def write_report(
    model: System | Path | str, images: Images[AnyImage], *, decoding: Decoding | None = None
) -> list[str]: ...


def write_report(
    model: System | Path | str, images: Any, *, decoding: Decoding | None = None
) -> str | list[str]:
    """Return the report that a model writes for an image; for a list of images, a list of reports.

    Args:
        model: a report generator or a MedViLL that was trained to write, or what `medvl.load`
            takes.
        images: one image (`medvl.data.ImageInput`) or a list.
        decoding: greedy by default (`medvl.models.Decoding`).

    Raises:
        ConfigError: the model writes no reports.
        ImageError, DicomError, FileNotFoundError: an image cannot be read.
    """
    system = open_model(model)
    if not isinstance(system, ReportWriter):
        raise refuse(system, "write reports", CAN_WRITE)
    tokenizer = system.require_tokenizer("writing")
    reports: list[str] = []
    with evaluating(system):
        for image_BCHW in batches(system, images):
            batch = make_batch(system, image_BCHW)
            reports += [
                text for text, _ in decode_texts(system, tokenizer, batch, decoding or Decoding())
            ]
    return reports[0] if is_single(images) else reports
