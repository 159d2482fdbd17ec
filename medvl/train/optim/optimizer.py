"""Parameter groups, the optimiser, and its state by parameter name.

`OptimConfig` is read here and in `medvl.train.optim.schedule`; nothing is passed back.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medvl import encoders
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.train.config import OptimConfig
from medvl.train.optim.lamb import Lamb
from medvl.train.parallel.model import STATE_SEPARATOR


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters with their `lr` and `weight_decay`.

    A model's own `parameter_groups(lr, weight_decay)`, which may also accept `layer_decay`, takes precedence over
    `medvl.encoders.parameter_groups`: no decay on biases, norms and scalars.

    Raises TrainingError where nothing is trainable, ConfigError where `layer_decay` is set and the model's own groups
    do not accept it.
    """
    own = getattr(model, "parameter_groups", None)
    make: Callable[..., list[dict[str, Any]]] = own or functools.partial(encoders.parameter_groups, model)
    options: dict[str, float] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.layer_decay is not None:
        if "layer_decay" not in inspect.signature(make).parameters:
            raise ConfigError(
                f"{type(model).__name__} has parameter groups without layers; leave layer_decay unset",
                "unsupported",
                field="layer_decay",
            )
        options["layer_decay"] = config.layer_decay
    groups = [dict(group, params=list(group["params"])) for group in make(**options)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(f"{type(model).__name__} has no trainable parameter; unfreeze a part of it", "empty")
    return groups


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser over `parameter_groups`; Adam's is fused on a GPU. A group's `lr_scale` is its rate divided
    by `lr`.

    A group of a sharded model is split in two, because a fused kernel takes only parameters of one kind. SGD is not
    fused: torch's kernel fails where a parameter gets its first gradient in a later update than others.
    """
    groups = [part for group in parameter_groups(model, config) for part in _by_kind(group)]
    for group in groups:
        group["lr_scale"] = group.get("lr", config.lr) / config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"]) or None
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, amsgrad=config.amsgrad, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's rate to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that the optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimiser's state as `parameter name::state name` -> tensor: moments and step counts.

    Rates and decays are not part of it: they follow from the config and the schedule.
    """
    tensors = {}
    for parameter, name in _names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum
                tensors[f"{name}{STATE_SEPARATOR}{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned. Raises CheckpointError where it belongs to other parameters."""
    parameters = {name: parameter for parameter, name in _names(model, optimizer).items()}
    indices = {name: index for index, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(STATE_SEPARATOR)
        if name not in indices:
            raise CheckpointError(
                f"the optimiser state has a parameter {name!r} that this run does not train", "mismatch", field=name
            )
        shape = parameters[name].shape
        if tensor.ndim and tensor.shape != shape:
            message = f"the optimiser state of {name!r} has shape {tuple(tensor.shape)}, the parameter {tuple(shape)}"
            raise CheckpointError(message, "mismatch", field=name)
        state.setdefault(indices[name], {})[key] = _laid_out_as(parameters[name], tensor)
    # load_state_dict moves each tensor to its parameter's device and dtype, except the step counts.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out_as(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return a moment with its parameter's strides, which fused kernels require. Files hold contiguous tensors."""
    strides = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=False)  # a step count has none
    if all(own == wanted for size, own, wanted in strides if size > 1):
        return tensor
    return torch.empty_strided(tensor.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _by_kind(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_kind: dict[type, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_kind.setdefault(type(parameter), []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_kind.values()]


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of the optimiser, in its order."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return {parameter: by_parameter[parameter] for parameter in trainable(optimizer)}
