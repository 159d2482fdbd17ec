"""Models for inference: loading, checks, batches of images."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from medvl.data.images.inputs import ImageInput
from medvl.data.transforms.image import as_list
from medvl.errors import ConfigError
from medvl.inference.modality import warn_of_other_images
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.schema import Batch

BATCH = 32
AnyImage = TypeVar("AnyImage", bound=ImageInput)
Images = list[AnyImage] | tuple[AnyImage, ...]
"""Several images."""


def open_model(model: System | Path | str) -> System:
    """Return the model, or load it (`medvl.load`). Raises CheckpointError as `load`, ConfigError for regions."""
    system = model if isinstance(model, System) else load(model)
    if system.inputs.regions:
        message = f"{system.name} reads the regions of a detector instead of pixels; evaluate it on shards with regions"
        raise ConfigError(message, "unsupported", field="model")
    return system


def refuse(model: System, task: str, able: str) -> ConfigError:
    """Return the error for a model that cannot do a task, naming those that can."""
    return ConfigError(f"a {model.name} cannot {task}; {able}", "unsupported", field="model")


def batches(model: System, images: Any, size: int = BATCH) -> Iterator[Tensor]:
    """Yield the images as the model takes them, on its device, `size` at a time. Raises as `EvalTransform`.

    Warns (UserWarning) of DICOM files that are of another kind than the model's training images by their header.
    """
    listed = as_list(images)
    if not len(listed):
        raise ConfigError("expected at least one image, got an empty list", "empty", field="images")
    if isinstance(listed, Sequence):
        warn_of_other_images(model, listed)
    for start in range(0, len(listed), size):
        yield model.transform(listed[start : start + size]).to(model.device)


def make_batch(model: System, image_BCHW: Tensor, texts: Sequence[str] | None = None) -> Batch:
    """Return a batch of images with a text each; without texts, with none. Raises ConfigError without a tokenizer."""
    count, device = len(image_BCHW), image_BCHW.device
    no_ids_BT = torch.empty(count, 0, dtype=torch.int64, device=device)
    ids_BT, mask_BT = (no_ids_BT, no_ids_BT.bool()) if texts is None else model.tokenize(texts)
    return Batch(
        keys=[str(number) for number in range(count)],
        image_BCHW=image_BCHW,
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.empty(count, 0, device=device),
        texts=[""] * count if texts is None else list(texts),
    )


def texts_for(images: Any, texts: str | Sequence[str], field: str) -> tuple[list[Any], list[str]]:
    """Return images and texts of equal number: one of either is repeated. Raises ConfigError for other numbers."""
    listed, each = list(as_list(images)), [texts] if isinstance(texts, str) else list(texts)
    listed = listed * len(each) if len(listed) == 1 else listed
    each = each * len(listed) if len(each) == 1 else each
    if len(listed) != len(each):
        message = f"expected one {field} or as many as images, got {len(each)} for {len(listed)} images"
        raise ConfigError(message, "mismatch", field=field)
    return listed, each


def is_single(images: Any) -> bool:
    """Return whether `images` is one image, not a list of them."""
    return as_list(images) is not images and not (hasattr(images, "ndim") and images.ndim == 4)
