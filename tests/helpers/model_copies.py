"""Copies of small models: drawing their weights takes several times as long."""

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch


class Settings(dict[str, Any]):
    """Settings that are a key: those with the same text are the same."""

    def __hash__(self) -> int:
        return hash(repr(self))


@functools.lru_cache(maxsize=100)
def _original(
    create: Callable[..., Any],
    seed: int,
    device: torch.device,
    settings: Settings,
    *arguments: Hashable,
) -> tuple[Any, Any]:
    """Return what a function creates after a seed, and torch's generator behind it."""
    return create(*arguments, **settings), torch.get_rng_state()


def created_once(
    create: Callable[..., Any], *arguments: Hashable, shared: Any = None, **settings: Any
) -> Any:
    """Return a copy of `create(*arguments, **settings)`, which is called once after each seed and
    on each default device.

    torch's generator is left as by the call. Copies have `shared` in common, such as a tokenizer.
    """
    device, key = torch.get_default_device(), Settings(settings)
    model, state = _original(create, torch.initial_seed(), device, key, *arguments)
    torch.set_rng_state(state)
    return copy.deepcopy(model, {} if shared is None else {id(shared): shared})
