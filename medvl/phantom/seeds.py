"""Random numbers that depend on names, not on the order of calls."""

import numpy as np

from medvl.errors import ConfigError


def generator(seed: int, *key: int) -> np.random.Generator:
    """The generator of one thing in the world of `seed`: equal keys give equal numbers, other keys independent ones.

    Raises `ConfigError` on a negative seed.
    """
    if seed < 0:
        raise ConfigError(f"seed must be 0 or more, not {seed}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
