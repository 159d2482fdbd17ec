"""LAMB (You et al., arXiv 1904.00962, ICLR 2020, algorithm 2), the optimiser of ALBERT and BioALBERT."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam's update with weight decay, scaled for each tensor by the norm of the weights over the norm of the update.

        m, v = moving averages of the gradient and of its square, bias-corrected
        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    The ratio is 1 where either norm is 0, and for biases and norms (tensors of one dimension), which BERT's recipes
    also exempt from decay.

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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient; `closure`, if given, computes the gradients and is returned."""
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
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]  # on the host: no wait for the device
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = state["exp_avg"] / (1 - beta1**step) / denominator + group["weight_decay"] * parameter
        if parameter.ndim > 1:
            weight_norm, update_norm = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
            ratio = weight_norm / update_norm
            update *= torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
        parameter.sub_(group["lr"] * update)
