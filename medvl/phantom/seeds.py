"""Random generators that depend on keys, not on the order of calls."""

import numpy as np

from medvl.errors import ConfigError


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator for a key in the world of `seed`; different keys give independent
    numbers.

    Raises ConfigError ("out_of_range") if the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed must be 0 or more, got {seed}", "out_of_range", field="seed")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
