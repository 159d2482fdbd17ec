"""Interpolation of a model's weights before and after fine-tuning (WiSE-FT, Wortsman et al., arXiv
2109.01903).

    model = interpolate("checkpoints/siglip", "runs/siglip-mimic/best", 0.5)

Continued training on radiographs degrades a model's earlier abilities. A point between the start
and the end keeps most of both; choose the share on validation data of both kinds.
"""

from pathlib import Path

import torch

from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.models.weights import add_training


def interpolate(start: Path | str, end: Path | str, share: float) -> System:
    """Return the model of `end` with weights interpolated from those of `start` (share 0) to those
    of `end` (share 1).

    Counters and other integers are copied from `end`. The model has the training manifests of both,
    so that evaluations refuse the patients of either.

    Raises ConfigError for a share outside of [0, 1], CheckpointError as `load` does, or where the
    two are not the same system with weights of the same names and shapes and the same vocabulary.
    """
    if not 0 <= share <= 1:
        raise ConfigError(
            f"share must be within [0, 1], got {share}", "out_of_range", field="share"
        )
    model = load(end)
    other = load(start)
    ours = model.state_dict()
    theirs = other.state_dict()
    shapes, their_shapes = (
        {name: tensor.shape for name, tensor in each.items()} for each in (ours, theirs)
    )
    if model.name != other.name or shapes != their_shapes:
        different = sorted(
            name for name in {*shapes, *their_shapes} if shapes.get(name) != their_shapes.get(name)
        )
        detail = (
            f"a {other.name} and a {model.name}, {len(different)} weights differ: "
            f"{', '.join(different[:3])}"
        )
        raise CheckpointError(f"{start} and {end} cannot be interpolated: {detail}", "mismatch")
    words, their_words = (
        None if each.tokenizer is None else each.tokenizer.vocabulary for each in (model, other)
    )
    if words != their_words:
        raise CheckpointError(
            f"{start} and {end} have different vocabularies", "mismatch", field="tokenizer"
        )
    with torch.no_grad():
        for name, tensor in ours.items():
            if tensor.is_floating_point():
                tensor.copy_(torch.lerp(theirs[name].to(tensor.dtype), tensor, share))
    add_training(other, model)
    return model
