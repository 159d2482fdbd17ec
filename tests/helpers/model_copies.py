"""Copies of small models: drawing their weights takes several times as long."""

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch


@functools.lru_cache(maxsize=100)
def _original(
    create: Callable[..., Any], seed: int, device: torch.device, *arguments: Hashable
) -> tuple[Any, Any]:
    """Return what a function creates after a seed, and torch's generator behind it."""
    return create(*arguments), torch.get_rng_state()


def created_once(create: Callable[..., Any], *arguments: Hashable, shared: Any = None) -> Any:
    """Return a copy of `create(*arguments)`, which is called once after each seed and on each
    default device.

    torch's generator is left as by the call. Copies have `shared` in common, such as a tokenizer.
    """
    model, state = _original(create, torch.initial_seed(), torch.get_default_device(), *arguments)
    torch.set_rng_state(state)
    return copy.deepcopy(model, {} if shared is None else {id(shared): shared})
