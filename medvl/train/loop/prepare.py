"""What the settings of a run ask of its model before the first step."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from medvl.encoders import TextEncoder, checkpoint_activations
from medvl.encoders.base import Encoder
from medvl.errors import ConfigError
from medvl.train.config import TrainConfig
from medvl.train.parallel.distributed import RankInfo

if TYPE_CHECKING:
    from medvl.train.parallel.fsdp import FSDPModel


def prepare(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Take the model to its device and into train mode, and set how it computes.

    Raises ConfigError where `packed_text` or `checkpoint_activations` is nothing for this model.
    """
    model.to(device)
    if config.channels_last:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    model.train()
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    if config.packed_text:
        _pack([encoder for encoder in encoders if isinstance(encoder, TextEncoder)])
    if config.checkpoint_activations:
        _checkpoint(encoders)
    if config.compile:
        model.compile()


def prepare_ranks(model: nn.Module, config: TrainConfig, world: RankInfo) -> "FSDPModel | None":
    """`prepare` the model, and cut its weights over the ranks where the settings ask for that and there are several.

    Raises ConfigError as `prepare` does, and where `shard_weights` is nothing for this model.
    """
    if not config.shard_weights or world.size == 1:
        prepare(model, config, world.device)
        return None
    from medvl.train.parallel.fsdp import FSDPModel  # torch's half of it takes seconds to import

    # What is to be cut does not fit on the device, and must be contiguous.
    prepare(model, dataclasses.replace(config, channels_last=False), torch.device("cpu"))
    return FSDPModel(model, world)


def _pack(encoders: Sequence[TextEncoder]) -> None:
    if not encoders:
        raise ConfigError("packed_text: the model has no text encoder, leave it unset")
    for encoder in encoders:
        encoder.pack()


def _checkpoint(encoders: Sequence[Encoder]) -> None:
    """All encoders that can be; a CNN beside a Transformer stays as it is."""
    refused = []
    for encoder in encoders:
        try:
            checkpoint_activations(encoder)
        except ConfigError as error:
            refused.append(str(error))
    if len(refused) == len(encoders):
        raise ConfigError(f"checkpoint_activations: {'; '.join(refused) or 'the model has no encoder'}, leave it unset")
