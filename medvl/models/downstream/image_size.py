"""Fine-tuning of a fusion-encoder at another image size than its pretraining."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.encoders import ImageEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.models.factory import create_model
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.lineage import copy_training


def at_image_size(model: FusionModel, size: int) -> FusionModel:
    """Return the model for images of `size` pixels, with the same weights.

    Learned positions of image patches, and those of a moving-average teacher, are interpolated to the new grid; tables
    that are computed, such as the pixel decoder's, belong to the new grid. Where the cells of a convolutional encoder
    cover another number of pixels, the head that predicts these has new weights: fine-tuning does not read it.

    Raises:
        ConfigError: the model does not support the size, numbers the cells of its images by rows of a table that words
            have too, or has a tensor that depends on the image's size and is not such a table.
    """
    if size == model.config.image_size or isinstance(model.image_encoder, RegionEncoder):
        return model
    changed: dict[str, Any] = {"image_size": size, "image_weights": None, "text_weights": None}
    arguments = model.config.image_arguments  # without a stretch to the former size
    changed["image_arguments"] = {name: arguments[name] for name in arguments if name not in ("image_size", "stretch")}
    config = dataclasses.replace(model.config, **changed)
    other = create_model(config, tokenizer=model.tokenizer)
    assert isinstance(other, FusionModel)
    encoders = [each.image_encoder for each in (model, other)]
    old, new = (each.grid(*each.image_size) for each in encoders if isinstance(each, ImageEncoder))
    if model.numbers_cells and old != new:
        raise _unsupported(f"positions of cells in {model.name} belong", model, size)
    tensors, expected = model.state_dict(), other.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            is_of_pixels = name.startswith("mim_head.pixels.")
            tensors[name] = expected[name] if is_of_pixels else resize_positions(tensor, old, new)
            if tensors[name].shape != expected[name].shape:
                raise _unsupported(f"{name} of {model.name} belongs", model, size)
    other.load_state_dict(tensors, strict=True)
    copy_training(model, other)
    return other.train(model.training)


def _unsupported(subject: str, model: FusionModel, size: int) -> ConfigError:
    message = f"{subject} to images of {model.config.image_size} pixels, got {size}; fine-tune at the former size"
    return ConfigError(message, "unsupported", field="image_size")


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate a position table (..., N + h * w, D) to another grid; the N vectors before the grid stay.

    Bicubic without antialiasing, as M3AE's, METER's and ALBEF's released code. A table of another form is returned
    unchanged.
    """
    prefix = table.shape[-2] - math.prod(old) if table.ndim in (2, 3) else -1
    if prefix < 0 or table[..., 0, 0].numel() != 1:
        return table
    table_ND = table.reshape(table.shape[-2:])
    grid_1Dhw = table_ND[prefix:].unflatten(0, old).permute(2, 0, 1)[None].float()
    resized_1Dhw = F.interpolate(grid_1Dhw, new, mode="bicubic", align_corners=False)
    patches_PD = resized_1Dhw[0].flatten(1).T.to(table.dtype)
    resized = torch.cat([table_ND[:prefix], patches_PD])
    return resized.reshape(*table.shape[:-2], *resized.shape)
