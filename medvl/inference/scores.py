"""Probabilities of findings and phrases in images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from medvl.common.label_names import match_labels
from medvl.data.images.inputs import ImageInput
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.zero_shot_classification.prompts import ClassPrompts, PromptSet, load_prompts
from medvl.eval.zero_shot_classification.scores import PromptScorer
from medvl.inference.models import AnyImage, Images, batches, is_single, make_batch, open_model, refuse
from medvl.inference.prompts import PROMPTS, Texts, prompts_for
from medvl.models import DualEncoder, LabelModel
from medvl.models.base import System
from medvl.models.eval_mode import evaluating
from medvl.schema import Embeddings

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
            prompt_set = prompts_for([texts] if isinstance(texts, str) else texts, prompts, temperature)
            with evaluating(self.model):
                self._score = PromptScorer(self.model, prompt_set)
            self.names, self.sentences = tuple(prompt_set.classes), prompt_set.classes
        elif isinstance(self.model, LabelModel) and self.model.reads == "image":
            self.names, self._columns = _labels(self.model, [texts] if isinstance(texts, str) else texts)
        else:
            raise refuse(self.model, "give probabilities of texts in an image", ABLE)

    def __call__(self, images: Any) -> Tensor:
        """Return (N, L) float64 on the CPU: the probability of each text in each image, as in `infer`."""
        return torch.cat([self.prepared(image_BCHW) for image_BCHW in batches(self.model, images)])

    def prepared(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, L) float64 on the CPU, of images from the model's `transform`."""
        return self.scored(encode_images(self.model, image_BCHW))

    def scored(self, images: Embeddings | Tensor) -> Tensor:
        """Return (B, L) float64 on the CPU, from the output of `encode_images` or some of its rows."""
        with evaluating(self.model):
            if self._score is not None:
                assert isinstance(images, Embeddings)
                score_BL = self._score(images)
            else:
                assert isinstance(images, Tensor)
                score_BL = images[:, self._columns].double().cpu()
        if not score_BL.isfinite().all():
            raise EvaluationError("a probability is not finite: check the model's weights", "nonfinite")
        return score_BL


def encode_images(model: System, image_BCHW: Tensor) -> Embeddings | Tensor:
    """Return the input of a `Scorer`: embeddings, or (B, L) probabilities of a classifier's labels.

    Raises ConfigError for other models.
    """
    image_BCHW = image_BCHW.to(model.device)
    with evaluating(model):
        if isinstance(model, DualEncoder):
            return model.embed_images(image_BCHW)
        if isinstance(model, LabelModel) and model.reads == "image":
            return model.probabilities(make_batch(model, image_BCHW))
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
    """Return the probability of each text in an image: {text: probability}; for a list of images a list of these.

    Dual-encoders follow the protocol of `medvl eval zero-shot`: the probability of a text is the softmax over its
    similarity and that of its negation, divided by the prompt set's temperature. These probabilities rank images; they
    are not calibrated. Classifiers give those of their own labels.

    Args:
        model: a dual-encoder or a classifier of images, or what `medvl.load` takes; load it once for several calls.
        images: one image (`medvl.data.ImageInput`: path, bytes, PIL, numpy, tensor, DICOM) or a list of them.
        texts: a text or a list of them: names of findings, which have the sentences of `prompts`; other phrases, as in
            "left pleural effusion", compared with "no" before them; pairs (sentence for, sentence against); or a
            mapping of names to pairs. None for all findings of the set, or all labels of a classifier.
        prompts: prompt set of dual-encoders: its name (`medvl list prompts`), a JSON file, or a `PromptSet`.
        temperature: divisor of similarities before the softmax; None takes the prompt set's.

    Raises:
        ConfigError: the model is neither, or a classifier has no such label.
        EvaluationError: the texts or the prompt set cannot be used (`medvl.inference.prompts_for`).
        ImageError, DicomError, FileNotFoundError: an image cannot be read.

    Warns (UserWarning) of DICOM files that are of another kind than the model's training images by their modality or
    body part; where the checkpoint does not record the kind, chest radiographs are expected.
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
        text: found for text in texts if isinstance(text, str) for found in match_labels(labels, [text], synonyms=False)
    }
    unknown = [text for text in texts if text not in label_of]
    if unknown or not texts:
        message = f"this classifier has the labels {', '.join(labels)}; got {unknown[0]!r}" if unknown else "no texts"
        raise ConfigError(message, "unknown_name" if unknown else "empty", field="texts")
    return tuple(texts), [labels.index(label_of[text]) for text in texts]
