"""Parameter groups, the optimiser, and its state by parameter name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medvl import encoders
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.train.config import OptimConfig

_SEPARATOR = "::"
"""Between a parameter's name and the name of its state, in the keys of `optimizer_tensors`."""


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of the trainable parameters with their `lr` and `weight_decay`.

    A model that has `parameter_groups(lr, weight_decay)` decides itself, and so does one that takes `layer_decay` too;
    for all others it is `medvl.encoders.parameter_groups`: no decay on biases, norms and scalars.

    Raises TrainingError where nothing is trainable, ConfigError where `layer_decay` is set and the model's own groups
    know of none.
    """
    own = getattr(model, "parameter_groups", None)
    make: Callable[..., list[dict[str, Any]]] = own or functools.partial(encoders.parameter_groups, model)
    options: dict[str, float] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.layer_decay is not None:
        if "layer_decay" not in inspect.signature(make).parameters:
            raise ConfigError(f"{type(model).__name__} makes its own groups without layers: leave layer_decay unset")
        options["layer_decay"] = config.layer_decay
    groups = [dict(group, params=list(group["params"])) for group in make(**options)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(f"{type(model).__name__} has no trainable parameter: everything is frozen")
    return groups


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser over `parameter_groups`; fused on a GPU. Each group's `lr_scale` is its rate as a share of `lr`.

    Of a sharded model a group becomes two: one kernel takes parameters that are all cut, or all whole.
    """
    groups = [part for group in parameter_groups(model, config) for part in _by_kind(group)]
    for group in groups:
        group["lr_scale"] = group.get("lr", config.lr) / config.lr
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"]) or None
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its share of the base rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def parameter_name(key: str) -> str:
    """Whose state a tensor of `optimizer_tensors` is."""
    return key.rpartition(_SEPARATOR)[0]


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as `parameter name::state name` -> tensor: momenta and step counts, nothing to unpickle.

    Rates and decays are not in it: they follow from the config and the schedule.
    """
    tensors = {}
    for parameter, name in _names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum
                tensors[f"{name}{_SEPARATOR}{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the optimiser the state that `optimizer_tensors` wrote.

    Raises CheckpointError where it is the state of other parameters or of another optimiser.
    """
    indices = {name: index for index, name in enumerate(_names(model, optimizer).values())}
    shapes = {name: parameter.shape for parameter, name in _names(model, optimizer).items()}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(_SEPARATOR)
        if name not in indices:
            raise CheckpointError(f"the optimiser state is of a parameter {name!r} that this run does not train")
        if tensor.ndim and tensor.shape != shapes[name]:
            raise CheckpointError(
                f"the optimiser state of {name!r} has shape {tuple(tensor.shape)}, the parameter {tuple(shapes[name])}"
            )
        state.setdefault(indices[name], {})[key] = tensor
    # load_state_dict takes each tensor to its parameter's device and dtype, but for the step counts, which stay put.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _by_kind(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_kind: dict[type, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_kind.setdefault(type(parameter), []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_kind.values()]


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Name of each parameter of the optimiser, in its order."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return {parameter: by_parameter[parameter] for parameter in trainable(optimizer)}
