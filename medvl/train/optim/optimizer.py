"""Parameter groups, the optimiser, and its state by parameter name.

`OptimConfig` is read here and in `medvl.train.optim.optimizer`; nothing is passed back.
"""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from medvl import encoders
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.train.config import (
    Constant,
    Cosine,
    CosineRestarts,
    Linear,
    OptimConfig,
    Plateau,
    StepDecay,
)
from medvl.train.parallel.model import STATE_SEPARATOR

# Learning rate of each step.
#
# The rates are closed forms of the step number, so a resumed run replays nothing; only `Plateau`
# has state.


class LearningRate:
    """Base learning rate over a run. Steps count from 0.

    Args:
        optim: `lr` and `schedule`.
        total_steps: updates of the run.
        mode: whether a smaller or a larger metric is better in `observe`.
        steps_per_epoch: updates of an epoch, for `StepDecay` and `CosineRestarts`.
    """

    def __init__(
        self,
        optim: OptimConfig,
        total_steps: int,
        mode: Literal["min", "max"] = "min",
        steps_per_epoch: int = 1,
    ) -> None:
        self._lr = optim.lr
        self._schedule = optim.schedule
        self._mode = mode
        self.total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self.plateaus = 0
        """Times that `Plateau` has lowered the rate."""
        self.best: float | None = None
        self.bad = 0
        """Validations since the best one, or since the rate was last lowered."""

    @property
    def depends_on_length(self) -> bool:
        """Whether a run of another length has other rates from the start."""
        return isinstance(self._schedule, (Linear, Cosine))

    @property
    def depends_on_metric(self) -> bool:
        """Whether `observe` may lower the rate."""
        return isinstance(self._schedule, Plateau)

    def at(self, step: int) -> float:
        """Return the rate of update number `step`; a decaying rate would reach `min_lr` at
        number `total_steps`.
        """
        warmup = self._schedule.warmup_steps
        if step < warmup:
            return self._after_warmup(0.0) * (step + 1) / warmup
        if isinstance(self._schedule, StepDecay):
            return self._lr * self._schedule.factor ** (
                step // self._steps_per_epoch // self._schedule.epochs
            )
        if isinstance(self._schedule, CosineRestarts):
            return self._after_warmup(
                step // self._steps_per_epoch % self._schedule.epochs / self._schedule.epochs
            )
        return self._after_warmup((step - warmup) / max(self.total_steps - warmup, 1))

    def observe(self, value: float) -> bool:
        """Record the metric of a validation; return whether the rate was lowered. A NaN counts as
        no improvement.

        The rule is that of torch's ReduceLROnPlateau with a relative threshold.
        """
        if not isinstance(self._schedule, Plateau):
            return False
        if math.isfinite(value) and (self.best is None or self._improves(value, self.best)):
            self.best = value
            self.bad = 0
            return False
        self.bad += 1
        if self.bad <= self._schedule.patience:
            return False
        self.plateaus = self.plateaus + 1
        self.bad = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"plateaus": self.plateaus, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.plateaus = state["plateaus"]
        self.best = state["best"]
        self.bad = state["bad"]

    def _after_warmup(self, progress: float) -> float:
        """Return the rate at a fraction of the way from the end of the warm-up to the end of the
        run.
        """
        lr = self._lr
        match self._schedule:
            case Constant() | StepDecay():
                return lr
            case Linear(min_lr=low):
                return low + (lr - low) * (1 - progress)
            case Cosine(min_lr=low) | CosineRestarts(min_lr=low):
                return low + (lr - low) * (1 + math.cos(math.pi * progress)) / 2
            case Plateau(factor=factor, min_lr=low):
                return max(lr * factor**self.plateaus, low)

    def _improves(self, value: float, best: float) -> bool:
        threshold = self._schedule.threshold if isinstance(self._schedule, Plateau) else 0.0
        margin = threshold * abs(best)
        return value < best - margin if self._mode == "min" else value > best + margin


# Number formats of the step: float32 or 16-bit autocast; weights and optimiser stay in float32.

_log = logging.getLogger(__name__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_LOWEST_SCALE = 1.0
"""fp16 lowers its loss scale on overflow. At this scale an overflow is caused by the model."""


class Precision:
    """Autocast, and for fp16 a loss scale that keeps small gradients from vanishing.

    On a CPU whose instructions do not multiply bfloat16 (x86 without AVX-512), where torch is 15
    times as slow in it as in float32, "bf16" is computed in float32.
    """

    def __init__(self, kind: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        if kind == "bf16" and device.type == "cpu" and not _cpu_multiplies_bf16():
            _log.info(
                "bf16 is computed in float32: this CPU has no instructions for it, and would be "
                "slower"
            )
            kind = "fp32"
        self.kind = kind
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run operations of this context in 16 bits where autocast allows it.

        On a CPU, attention then uses torch's unfused form: the fused backward pass takes four times
        as long in 16 bits (49 tokens, torch 2.13).
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attention())
            if self.kind != "fp32":
                stack.enter_context(torch.autocast(self.device.type, dtype=_DTYPES[self.kind]))
            yield

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, scaled for fp16."""
        with self._attention():  # for layers that are recomputed
            self.scaler.scale(loss).backward()

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        plain = self.kind != "fp32" and self.device.type == "cpu"
        return sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, before their norm is computed and clipped."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimiser's step."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def skip_step(self) -> bool:
        """Close a step without an update: lower the scale after non-finite gradients.

        Returns whether a too large scale may be the cause of non-finite gradients.
        """
        searching = self.kind == "fp16" and self.scaler.get_scale() > _LOWEST_SCALE
        self.scaler.update()
        return searching

    def state_dict(self) -> dict[str, Any]:
        """Return the scale's state as JSON values; empty except for fp16."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            self.scaler.load_state_dict(dict(state))


def _cpu_multiplies_bf16() -> bool:
    is_supported: bool = (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return is_supported


# LAMB (You et al., arXiv 1904.00962, ICLR 2020, algorithm 2), the optimiser of ALBERT and
# BioALBERT.


class Lamb(torch.optim.Optimizer):
    """Adam's update with weight decay, scaled for each tensor by the norm of the weights over the
    norm of the update.

        m, v = moving averages of the gradient and of its square, bias-corrected
        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    The ratio is 1 where either norm is 0, and for biases and norms (tensors of one dimension),
    which BERT's recipes also exempt from decay.

    Args:
        params: parameters, or groups with `lr` and `weight_decay` of their own.
        lr, betas, eps, weight_decay: as above.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient; `closure`, if given, computes the
        gradients and is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        state["step"] += 1
        # on the host: no wait for the device
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (
            state["exp_avg"] / (1 - beta1**step) / denominator + group["weight_decay"] * parameter
        )
        if parameter.ndim > 1:
            weight_norm = torch.linalg.vector_norm(parameter)
            update_norm = torch.linalg.vector_norm(update)
            ratio = weight_norm / update_norm
            update *= torch.where(
                (weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio)
            )
        parameter.sub_(group["lr"] * update)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters with their `lr` and `weight_decay`.

    A model's own `parameter_groups(lr, weight_decay)`, which may also accept `layer_decay`, takes
    precedence over `medvl.encoders.parameter_groups`: no decay on biases, norms and scalars.

    Raises TrainingError where nothing is trainable, ConfigError where `layer_decay` is set and the
    model's own groups do not accept it.
    """
    own = getattr(model, "parameter_groups", None)
    make: Callable[..., list[dict[str, Any]]] = own or functools.partial(
        encoders.parameter_groups, model
    )
    options: dict[str, float] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.layer_decay is not None:
        if "layer_decay" not in inspect.signature(make).parameters:
            raise ConfigError(
                f"{type(model).__name__} has parameter groups without layers; leave layer_decay "
                f"unset",
                "unsupported",
                field="layer_decay",
            )
        options["layer_decay"] = config.layer_decay
    groups = [dict(group, params=list(group["params"])) for group in make(**options)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(
            f"{type(model).__name__} has no trainable parameter; unfreeze a part of it", "empty"
        )
    return groups


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser over `parameter_groups`; Adam's is fused. A group's `lr_scale` is its
    rate divided by `lr`.

    A group of a sharded model is split in two, because a fused kernel takes only parameters of one
    kind. SGD is not fused: torch's kernel fails where a parameter gets its first gradient in a
    later update than others.
    """
    groups = [part for group in parameter_groups(model, config) for part in _by_kind(group)]
    for group in groups:
        group["lr_scale"] = group.get("lr", config.lr) / config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda"} or None
    return kind(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        amsgrad=config.amsgrad,
        fused=fused,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's rate to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that the optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimiser's state as `parameter name::state name` -> tensor: moments and step
    counts.

    Rates and decays are not part of it: they follow from the config and the schedule.
    """
    tensors = {}
    for parameter, name in _names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum
                tensors[f"{name}{STATE_SEPARATOR}{key}"] = (
                    value if isinstance(value, Tensor) else torch.tensor(value)
                )
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Load what `optimizer_tensors` returned. Raises CheckpointError where it belongs to other
    parameters.
    """
    parameters = {name: parameter for parameter, name in _names(model, optimizer).items()}
    indices = {name: index for index, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(STATE_SEPARATOR)
        if name not in indices:
            raise CheckpointError(
                f"the optimiser state has a parameter {name!r} that this run does not train",
                "mismatch",
                field=name,
            )
        shape = parameters[name].shape
        if tensor.ndim and tensor.shape != shape:
            message = (
                f"the optimiser state of {name!r} has shape {tuple(tensor.shape)}, the "
                f"parameter {tuple(shape)}"
            )
            raise CheckpointError(message, "mismatch", field=name)
        state.setdefault(indices[name], {})[key] = _laid_out_as(parameters[name], tensor)
    # load_state_dict moves each tensor to its parameter's device and dtype, except the step counts.
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _laid_out_as(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return a moment with its parameter's strides, which fused kernels require. Files hold
    contiguous tensors.
    """
    # a step count has no strides
    strides = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=False)
    if all(own == wanted for size, own, wanted in strides if size > 1):
        return tensor
    return torch.empty_strided(
        tensor.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _by_kind(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_kind: dict[type, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_kind.setdefault(type(parameter), []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_kind.values()]


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of the optimiser, in its order."""
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return {parameter: by_parameter[parameter] for parameter in trainable(optimizer)}
