"""Preparation of a model for training: device, memory format, packing, checkpointing,
compilation, parallelism.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from medvl.encoders import TextEncoder, checkpoint_activations
from medvl.encoders.base import Encoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.parts.encoder import DualStream
from medvl.train.config import TrainConfig
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import DDPModel, ParallelModel


def prepare(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Move the model to its device, switch to train mode, and apply the settings of its
    computation.

    Raises ConfigError where `packed_text` or `checkpoint_activations` does not apply to this model.
    """
    model.to(device)
    if config.channels_last:
        torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    model.train()
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    if config.packed_text:
        _pack(model)
    if config.checkpoint_activations:
        _checkpoint(encoders)
    if config.compile:
        model.compile()


def parallelize(model: nn.Module, config: TrainConfig, ranks: RankInfo) -> ParallelModel:
    """Prepare the model, and wrap it for the ranks: sharded where the settings say so and there are
    several.

    Raises ConfigError as `prepare` does.
    """
    if not config.shard_weights or ranks.size == 1:
        prepare(model, config, ranks.device)
        return DDPModel(model, ranks, config.find_unused_parameters)
    from medvl.train.parallel.model import FSDPModel  # torch's part of it takes seconds to import

    # The complete model may not fit on the device, and sharding needs contiguous weights. Blocks
    # are compiled alone.
    prepare(
        model, dataclasses.replace(config, channels_last=False, compile=False), torch.device("cpu")
    )
    return FSDPModel(model, ranks, compile=config.compile)


def _pack(model: nn.Module) -> None:
    """Pack the text encoders, and the text's stream of a dual-stream fusion-encoder."""
    modules = list(model.modules())
    if not any(isinstance(module, TextEncoder) for module in modules):
        raise ConfigError(
            "the model has no text encoder; leave packed_text unset",
            "unsupported",
            field="packed_text",
        )
    for module in modules:
        if isinstance(module, (TextEncoder, DualStream)):
            module.pack()


def _checkpoint(encoders: Sequence[Encoder]) -> None:
    """Checkpoint the activations of all encoders that support it; a CNN beside a Transformer is
    left unchanged.
    """
    refusals = []
    for encoder in encoders:
        try:
            checkpoint_activations(encoder)
        except ConfigError as error:
            refusals.append(str(error))
    if len(refusals) == len(encoders):
        reasons = "; ".join(refusals) or "the model has no encoder"
        raise ConfigError(
            f"{reasons}; leave checkpoint_activations unset",
            "unsupported",
            field="checkpoint_activations",
        )
