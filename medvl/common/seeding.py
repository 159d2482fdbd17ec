"""Randomness of the steps, without generator states in checkpoints.

Before each micro-batch torch's generators are seeded from (seed, step, micro-batch, rank). So dropout and masking are
a function of the position in the run: whoever resumes at a step draws what the run that was not interrupted draws.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch

RULE = "blake2b(seed/purpose/position...) per micro-batch"
"""Stored with each checkpoint: another rule would be another run."""


def derive(seed: int, purpose: str, *position: int) -> int:
    """A 64-bit seed that depends on all of its arguments."""
    text = "/".join(map(str, (seed, purpose, *position)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def reseed(seed: int, device: torch.device) -> None:
    """Seed the generators that a step draws from: the CPU's and this device's.

    Not `torch.manual_seed`: that also queues a call for every CUDA device of a process that never starts CUDA.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within this context torch's CPU generator starts from `seed`; afterwards it is as it was.

    A model that is made in it has the same initial weights each time the same command runs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "init"))
        yield


@contextlib.contextmanager
def caller_keeps_generators(device: torch.device) -> Iterator[None]:
    """The run may seed the generators as it likes: afterwards they are as the caller had them."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
