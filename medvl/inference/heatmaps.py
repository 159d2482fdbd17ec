"""Heat maps of a text in an image, in pixels of the original."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.images.inputs import ImageInput
from medvl.errors import ConfigError
from medvl.eval.grounding.heatmaps import Maps, choose_maps, phrase_maps
from medvl.inference.modality import warn_of_other_images
from medvl.inference.models import is_single, make_batch, open_model, refuse
from medvl.models import VQA, DualEncoder
from medvl.models.base import System
from medvl.models.downstream.vqa.attention import question_attention
from medvl.models.eval_mode import evaluating
from medvl.models.heatmaps import on_image

ABLE = "use a dual-encoder (gloria, biovil, convirt, ...) or a VQA model whose image encoder has a grid"


def heatmap(
    model: System | Path | str,
    image: ImageInput,
    text: str,
    *,
    maps: Maps | None = None,
    smoothing: float = 0.0,
) -> NDArray[np.float32]:
    """Return the heat map of a text: (H, W) float32 in pixels of the original image, NaN outside of the model's crop.

    Dual-encoders compare the text with each region (`medvl eval grounding`): the attention of its words where the model
    has one (GLoRIA), else the cosine similarity, which may be negative. VQA models give the attention of the question's
    words. Larger is warmer; values of two images or models cannot be compared.

    Args:
        model: the model, or what `medvl.load` takes.
        image: one image (`medvl.data.ImageInput`).
        text: a phrase, or a question for a VQA model.
        maps: "attention" or "similarity", of dual-encoders; None takes attention where the model has it.
        smoothing: standard deviation, in cells of the grid, of a Gaussian over similarity maps (BioViL: 1.5).

    Raises:
        ConfigError: the model has no such maps, `image` or `text` is a list, or the text is empty.
        EvaluationError: the image encoder has no grid of patches in the space of texts, or `maps` does not exist.
        ImageError, DicomError, FileNotFoundError: the image cannot be read.

    Warns (UserWarning) as `medvl.infer`.
    """
    system = open_model(model)
    if not is_single(image):
        raise ConfigError("expected one image, got a list; call heatmap for each", "wrong_type", field="image")
    if not isinstance(text, str):
        raise ConfigError("expected one text; call heatmap for each", "wrong_type", field="text")
    if not text.strip():
        raise ConfigError("expected a text, got an empty one", "empty", field="text")
    if not isinstance(system, DualEncoder | VQA):
        raise refuse(system, "locate a text in an image", ABLE)
    warn_of_other_images(system, [image])
    pixels = system.transform.read(image)
    image_BCHW, size = system.transform(pixels).to(system.device), (pixels.shape[0], pixels.shape[1])
    with evaluating(system):
        if isinstance(system, DualEncoder):
            kind = choose_maps(system, maps)
            [map_HW] = phrase_maps(system, image_BCHW, [text], [size], maps=kind, smoothing=smoothing)
        else:
            map_HW = _question_map(system, image_BCHW, text, size)
    result: NDArray[np.float32] = map_HW.float().cpu().numpy()
    return result


@torch.no_grad()
def _question_map(model: VQA, image_BCHW: Tensor, question: str, size: tuple[int, int]) -> Tensor:
    attention = question_attention(model.fusion_model, make_batch(model, image_BCHW, [question]))
    if attention.grid is None:
        raise refuse(model, "locate a text in an image", ABLE)
    map_1hw = attention.words_BP.unflatten(1, attention.grid)
    placed: Any = on_image(map_1hw, model.transform.box(*size), *size)[0]
    return placed
