"""Randomness of the steps without generator states in checkpoints.

Before each micro-batch torch's generators are seeded from (seed, step, micro-batch, rank). So
dropout and masking are functions of the position in the run, and a resumed run draws the same
numbers as an uninterrupted one.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch

RULE = "blake2b(seed/purpose/position...) per micro-batch"
"""Name of the seeding rule, stored in each checkpoint; a run cannot resume under another rule."""


def derive(seed: int, purpose: str, *position: int) -> int:
    """Return a 64-bit seed that depends on all arguments."""
    text = "/".join(map(str, (seed, purpose, *position)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def reseed(seed: int, device: torch.device) -> None:
    """Seed the generators of a step: the CPU's and this device's.

    Unlike `torch.manual_seed`, this queues no call for every CUDA device in a process that never
    starts CUDA.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator in this context and restore it afterwards.

    A model created in it has the same initial weights in each run of the same command.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "init"))
        yield


@contextlib.contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the states of torch's generators on exit."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
