"""Answers about images: probabilities of findings and phrases, heat maps, answers to questions, and
reports.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.label_names import match_labels, spoken_name
from medvl.data.images.read import ImageInput
from medvl.data.volumes.transform import OrganVolumes, embedded_parts
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.grounding.heatmaps import Maps, choose_maps, phrase_maps
from medvl.eval.report_generation.generate import ReportWriter, decode_texts
from medvl.eval.zero_shot_classification.prompts import (
    COMPETING,
    ClassPrompts,
    PromptSet,
    load_prompts,
)
from medvl.eval.zero_shot_classification.protocol import PromptScorer
from medvl.inference.models import (
    BATCH,
    AnyImage,
    Images,
    batches,
    is_single,
    make_batch,
    open_model,
    refuse,
    study_batches,
    texts_for,
    warn_of_other_images,
)
from medvl.inference.volumes import reads_volumes, volume_heatmap
from medvl.models import VQA, DualEncoder, LabelModel
from medvl.models.base import System, evaluating
from medvl.models.downstream.vqa.attention import question_attention
from medvl.models.heatmaps import on_image
from medvl.models.text_decoding import Decoding
from medvl.schema import Batch, Embeddings

# Prompt sets from the texts of a user: names of findings, phrases, pairs of sentences.

Texts = Sequence[str | tuple[str, str]] | Mapping[str, tuple[str, str]]
"""Texts to score: names of findings, phrases, pairs of a sentence for and one against; or name
-> pair.
"""
PROMPTS = "chexpert_ensemble"
"""Prompt set of `medvl eval zero-shot`."""
_THERE = re.compile(r"there (?:is|are)\s+(?:an?\s+|the\s+)?", re.IGNORECASE)
_NEGATED = re.compile(r"(?:there (?:is|are) )?no\b|without\b", re.IGNORECASE)


def prompts_for(
    texts: Texts | None, prompts: PromptSet | Path | str = PROMPTS, temperature: float | None = None
) -> PromptSet:
    """Return the prompt set that scores texts.

    Args:
        texts: None for all classes of the set. The name of a class, in any spelling, has the
            sentences of the set; a pair is a sentence for and one against; another phrase X is
            compared as "There is X." with "There is no X.".
        prompts: a prompt set, its name (`medvl list prompts`) or a JSON file, with the rule and the
            temperature.
        temperature: divisor of similarities before the softmax; None takes the set's.

    Raises EvaluationError for an unknown or damaged set, one without probabilities, an empty list,
    an empty, negated or repeated text, and a phrase where the classes of the set compete with each
    other.
    """
    base = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
    if not base.gives_probabilities:
        message = (
            f"prompt set {base.name!r} gives no probabilities ({base.scoring}); evaluate "
            f"it with medvl eval zero-shot"
        )
        raise EvaluationError(message, "unsupported", field="prompts")
    if temperature is not None:
        if not 0 < temperature < float("inf"):
            raise EvaluationError(
                f"expected temperature > 0, got {temperature}", "out_of_range", field="temperature"
            )
        base = dataclasses.replace(base, temperature=temperature)
    if texts is None:
        return base
    pairs = (
        list(texts.items())
        if isinstance(texts, Mapping)
        else [(text, text) for text in _listed(texts)]
    )
    if not pairs:
        raise EvaluationError("expected at least one text, got none", "empty", field="texts")
    classes: dict[str, ClassPrompts] = {}
    for key, text in pairs:
        name = key if isinstance(key, str) else key[0]
        if name in classes:
            raise EvaluationError(f"duplicate text {name!r}", "conflict", field="texts")
        classes[name] = _sides(text, base)
    if base.scoring in COMPETING and len(classes) < 2:
        message = (
            f"{base.scoring} of {base.name!r} compares at least two classes; give two "
            f"texts or another set"
        )
        raise EvaluationError(message, "empty", field="texts")
    return dataclasses.replace(base, classes=classes)


def _listed(texts: Sequence[str | tuple[str, str]]) -> Sequence[str | tuple[str, str]]:
    return [texts] if isinstance(texts, str) else texts


def _sides(text: str | tuple[str, str], base: PromptSet) -> ClassPrompts:
    """Return the sentences for and against a text."""
    competing = base.scoring in COMPETING
    if isinstance(text, str):
        matches = match_labels(list(base.classes), [text], synonyms=False)
        if matches:
            return base.classes[next(iter(matches))]
        if not competing:
            return _pair_of(text)
        message = (
            f"prompt set {base.name!r} compares its own classes "
            f"{', '.join(base.classes)}, got {text!r}"
        )
        raise EvaluationError(message, "unknown_name", field="texts")
    if (
        competing
        or len(text) != 2
        or not all(isinstance(side, str) and side.strip() for side in text)
    ):
        message = (
            f"expected a pair of a sentence for and one against, for a set of pairs; got "
            f"{text!r} for {base.name!r}"
        )
        raise EvaluationError(message, "malformed", field="texts")
    return ClassPrompts(positive=(text[0],), negative=(text[1],))


def _pair_of(text: str) -> ClassPrompts:
    phrase = _THERE.sub("", text.strip(), count=1) if _THERE.match(text.strip()) else text.strip()
    phrase = phrase.rstrip(". ")
    phrase = spoken_name(phrase) if any(sign in phrase for sign in "_=") else phrase
    if not phrase:
        raise EvaluationError("expected a text, got an empty one", "empty", field="texts")
    if _NEGATED.match(text.strip()) or _NEGATED.match(phrase):
        message = (
            f"{text!r} is a negation; name the finding, or give a pair (sentence for, "
            f"sentence against)"
        )
        raise EvaluationError(message, "unsupported", field="texts")
    if not phrase[1:2].isupper():  # not an abbreviation
        phrase = phrase[0].lower() + phrase[1:]
    return ClassPrompts(positive=(f"There is {phrase}.",), negative=(f"There is no {phrase}.",))


ABLE = "use a dual-encoder (convirt, gloria, chexzero, ...) or a classifier of images"


class Scorer:
    """Probabilities of texts in images; the texts are encoded once.

    Attributes:
        model: a dual-encoder, or a classifier of images.
        names: the texts, in the order of the columns.
        sentences: those that each text is scored with; empty for a classifier.
        prompts: the complete prompt set of a dual-encoder; None for a classifier.
    """

    def __init__(
        self,
        model: System | Path | str,
        texts: Texts | str | None = None,
        *,
        prompts: PromptSet | Path | str = PROMPTS,
        temperature: float | None = None,
    ) -> None:
        """Encode the texts. Arguments and errors are as in `infer`."""
        self.model = open_model(model)
        self._score: PromptScorer | None = None
        self.prompts: PromptSet | None = None
        self._columns: list[int] = []
        self.sentences: Mapping[str, ClassPrompts] = {}
        if isinstance(self.model, DualEncoder):
            self.prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
            prompts = self.prompts
            prompt_set = prompts_for(
                [texts] if isinstance(texts, str) else texts, prompts, temperature
            )
            with evaluating(self.model):
                self._score = PromptScorer(self.model, prompt_set)
            self.names = tuple(prompt_set.classes)
            self.sentences = prompt_set.classes
        elif isinstance(self.model, LabelModel) and self.model.reads == "image":
            self.names, self._columns = _labels(
                self.model, [texts] if isinstance(texts, str) else texts
            )
        else:
            raise refuse(self.model, "give probabilities of texts in an image", ABLE)

    def __call__(self, images: Any) -> Tensor:
        """Return (N, L) float64 on the CPU: the probability of each text in each image, as in
        `infer`.
        """
        return torch.cat([self.prepared(image_BCHW) for image_BCHW in batches(self.model, images)])

    def prepared(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, L) float64 on the CPU, of images from the model's `transform`."""
        return self.scored(encode_images(self.model, image_BCHW))

    def scored(self, images: Embeddings | Tensor) -> Tensor:
        """Return (B, L) float64 on the CPU, from the output of `encode_images` or some of its
        rows.
        """
        with evaluating(self.model):
            if self._score is not None:
                assert isinstance(images, Embeddings)
                score_BL = self._score(images)
            else:
                assert isinstance(images, Tensor)
                score_BL = images[:, self._columns].double().cpu()
        if not score_BL.isfinite().all():
            raise EvaluationError(
                "a probability is not finite: check the model's weights", "nonfinite"
            )
        return score_BL


def encode_images(model: System, image_BCHW: Tensor | OrganVolumes) -> Embeddings | Tensor:
    """Return the input of a `Scorer`: embeddings, or (B, L) probabilities of a classifier's labels.

    Raises ConfigError for other models.
    """
    parts = embedded_parts(image_BCHW.to(model.device))
    with evaluating(model):
        if isinstance(model, DualEncoder):
            return model.embed_images(*parts)
        if isinstance(model, LabelModel) and model.reads == "image":
            return model.probabilities(make_batch(model, parts[0]))
    raise refuse(model, "give probabilities of texts in an image", ABLE)


@overload
def infer(
    model: System | Path | str,
    images: ImageInput,
    texts: Texts | str | None = None,
    *,
    prompts: PromptSet | Path | str = PROMPTS,
    temperature: float | None = None,
) -> dict[str, float]: ...


@overload
def infer(
    model: System | Path | str,
    images: Images[AnyImage],
    texts: Texts | str | None = None,
    *,
    prompts: PromptSet | Path | str = PROMPTS,
    temperature: float | None = None,
) -> list[dict[str, float]]: ...


def infer(
    model: System | Path | str,
    images: Any,
    texts: Texts | str | None = None,
    *,
    prompts: PromptSet | Path | str = PROMPTS,
    temperature: float | None = None,
) -> dict[str, float] | list[dict[str, float]]:
    """Return the probability of each text in an image: {text: probability}; for a list of images a
    list of these.

    Dual-encoders follow the protocol of `medvl eval zero-shot`: the probability of a text is the
    softmax over its similarity and that of its negation, divided by the prompt set's temperature.
    These probabilities rank images; they are not calibrated. Classifiers give those of their own
    labels.

    Args:
        model: a dual-encoder or a classifier of images, or what `medvl.load` takes; load it once
            for several calls.
        images: one image (`medvl.data.ImageInput`: path, bytes, PIL, numpy, tensor, DICOM) or a
            list of them.
        texts: a text or a list of them: names of findings, which have the sentences of `prompts`;
            other phrases, as in "left pleural effusion", compared with "no" before them; pairs
            (sentence for, sentence against); or a mapping of names to pairs. None for all findings
            of the set, or all labels of a classifier.
        prompts: prompt set of dual-encoders: its name (`medvl list prompts`), a JSON file, or a
            `PromptSet`.
        temperature: divisor of similarities before the softmax; None takes the prompt set's.

    Raises:
        ConfigError: the model is neither, or a classifier has no such label.
        EvaluationError: the texts or the prompt set cannot be used (`medvl.inference.prompts_for`).
        ImageError, DicomError, FileNotFoundError: an image cannot be read.

    Warns (UserWarning) of DICOM files that are of another kind than the model's training images by
    their modality or body part; where the checkpoint does not record the kind, chest radiographs
    are expected.
    """
    scorer = Scorer(model, texts, prompts=prompts, temperature=temperature)
    rows = [dict(zip(scorer.names, row, strict=True)) for row in scorer(images).tolist()]
    return rows[0] if is_single(images) else rows


def _labels(model: LabelModel, texts: Any) -> tuple[tuple[str, ...], list[int]]:
    """Return the texts as the user wrote them, and the columns of these labels."""
    labels: Sequence[str] = getattr(model.config, "labels", ())
    if texts is None:
        return tuple(labels), list(range(len(labels)))
    label_of = {
        text: label
        for text in texts
        if isinstance(text, str)
        for label in match_labels(labels, [text], synonyms=False)
    }
    unknown = [text for text in texts if text not in label_of]
    if unknown or not texts:
        message = (
            f"this classifier has the labels {', '.join(labels)}; got {unknown[0]!r}"
            if unknown
            else "no texts"
        )
        raise ConfigError(message, "unknown_name" if unknown else "empty", field="texts")
    return tuple(texts), [labels.index(label_of[text]) for text in texts]


# Heat maps of a text in an image, in pixels of the original.

HEATMAP_ADVICE = (
    "use a dual-encoder (gloria, biovil, convirt, ...) or a VQA model whose image "
    "encoder has a grid"
)


def heatmap(
    model: System | Path | str,
    image: ImageInput,
    text: str,
    *,
    maps: Maps | None = None,
    smoothing: float = 0.0,
) -> NDArray[np.float32]:
    """Return the heat map of a text: (H, W) float32 in pixels of the original image, NaN outside of
    the model's crop; of a volume (D, H, W), as `medvl.inference.volume_heatmap`.

    Dual-encoders compare the text with each region (`medvl eval grounding`): the attention of its
    words where the model has one (GLoRIA), else the cosine similarity, which may be negative. VQA
    models give the attention of the question's words. Larger is warmer; values of two images or
    models cannot be compared.

    Args:
        model: the model, or what `medvl.load` takes.
        image: one image (`medvl.data.ImageInput`), or one volume.
        text: a phrase, or a question for a VQA model.
        maps: "attention" or "similarity", of dual-encoders; None takes attention where the model
            has it.
        smoothing: standard deviation, in cells of the grid, of a Gaussian over similarity maps
            (BioViL: 1.5).

    Raises:
        ConfigError: the model has no such maps, `image` or `text` is a list, or the text is empty.
        EvaluationError: the image encoder has no grid of patches in the space of texts, or `maps`
            does not exist.
        ImageError, DicomError, FileNotFoundError: the image cannot be read.

    Warns (UserWarning) as `medvl.infer`.
    """
    system = open_model(model)
    if not is_single(image):
        raise ConfigError(
            "expected one image, got a list; call heatmap for each", "wrong_type", field="image"
        )
    if not isinstance(text, str):
        raise ConfigError("expected one text; call heatmap for each", "wrong_type", field="text")
    if not text.strip():
        raise ConfigError("expected a text, got an empty one", "empty", field="text")
    if reads_volumes(system):
        if maps == "attention" or smoothing:
            raise ConfigError(
                "volumes have maps of similarity without smoothing: leave both options out",
                "unsupported",
                field="maps",
            )
        return volume_heatmap(system, image, text)
    if not isinstance(system, DualEncoder | VQA):
        raise refuse(system, "locate a text in an image", HEATMAP_ADVICE)
    warn_of_other_images(system, [image])
    pixels = system.transform.read(image)
    image_BCHW = system.transform(pixels).to(system.device)
    size = (pixels.shape[0], pixels.shape[1])
    with evaluating(system):
        if isinstance(system, DualEncoder):
            kind = choose_maps(system, maps)
            [map_HW] = phrase_maps(
                system, image_BCHW, [text], [size], maps=kind, smoothing=smoothing
            )
        else:
            map_HW = _question_map(system, image_BCHW, text, size)
    result: NDArray[np.float32] = map_HW.float().cpu().numpy()
    return result


@torch.no_grad()
def _question_map(model: VQA, image_BCHW: Tensor, question: str, size: tuple[int, int]) -> Tensor:
    attention = question_attention(model.fusion_model, make_batch(model, image_BCHW, [question]))
    if attention.grid is None:
        raise refuse(model, "locate a text in an image", HEATMAP_ADVICE)
    map_1hw = attention.words_BP.unflatten(1, attention.grid)
    map_HW: Any = on_image(map_1hw, model.transform.box(*size), *size)[0]
    return map_HW


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
    if not isinstance(system, VQA) or system.config.earlier_image:
        raise refuse(system, "answer questions about single images", CAN_ANSWER)
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
    reports = _write(
        system, (make_batch(system, image) for image in batches(system, images)), decoding
    )
    return reports[0] if is_single(images) else reports


def write_study_reports(
    model: System | Path | str,
    studies: Sequence[Sequence[ImageInput]],
    *,
    decoding: Decoding | None = None,
) -> list[str]:
    """Return the report that a model writes for each study, from its images.

    Args:
        model: as in `write_report`.
        studies: the images of each study, one or more; a model reads as many of them, from the
            first on, as it was built for (`views`).
        decoding: greedy by default (`medvl.models.Decoding`).

    Raises as `write_report`, ConfigError for a study without an image.
    """
    system = open_model(model)
    return _write(system, study_batches(system, studies), decoding)


def _write(system: System, batches: Iterable[Batch], decoding: Decoding | None) -> list[str]:
    """Return the reports of batches. Raises ConfigError for a model that writes none."""
    if not isinstance(system, ReportWriter):
        raise refuse(system, "write reports", CAN_WRITE)
    tokenizer = system.require_tokenizer("writing")
    with evaluating(system):
        return [
            text
            for batch in batches
            for text, _ in decode_texts(system, tokenizer, batch, decoding or Decoding())
        ]
