"""Exposure settings and lead markers of a view."""

import dataclasses

import numpy as np

from medvl.phantom.seeds import generator

_SITE_STREAM = 96


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """Exposure and development of an image."""

    penetration: float
    """Factor on optical depth; higher values brighten the image."""
    contrast: float
    """Curvature of the tone curve, 0 to 1; higher values darken the lungs."""
    equalize: float
    """Share of low-frequency variation that processing removes, 0 to 1."""
    noise: float
    """Standard deviation of noise at full brightness, relative to the full range."""
    black: float
    """Level of the unexposed background, relative to the full range."""
    collimation: tuple[float, float, float, float]
    """Shares of the image that are masked at the top, right, bottom and left."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Lead letters in the image."""

    text: str
    x: float
    """Position of the text relative to width and height."""
    y: float
    height: float
    """Centimetres."""


def sample_exposure(rng: np.random.Generator, position: str) -> Exposure:
    """Sample an exposure; portable AP images have less contrast, more noise and more uneven borders than PA images."""
    portable = position == "AP"
    edges = rng.uniform(0.0, 0.05, 4) * (rng.random(4) < (0.45 if portable else 0.2))
    return Exposure(
        penetration=float(rng.normal(1.42 if portable else 1.5, 0.13)),
        contrast=float(np.clip(rng.normal(0.25 if portable else 0.42, 0.12), 0, 0.7)),
        equalize=float(rng.uniform(0.0, 0.22)),
        noise=float(rng.uniform(0.008, 0.022) * (1.3 if portable else 1.0)),
        black=float(rng.uniform(0.0, 0.04)),
        collimation=(float(edges[0]), float(edges[1]), float(edges[2]), float(edges[3])),
    )


def sample_markers(rng: np.random.Generator, position: str) -> tuple[Marker, ...]:
    """Sample a side marker, sometimes with AP or PORTABLE."""
    if position == "LATERAL":
        if rng.random() < 0.4:
            return ()
        return (Marker(text="L", x=rng.uniform(0.06, 0.12), y=rng.uniform(0.08, 0.2), height=1.0),)
    left = rng.random() < 0.6
    x = rng.uniform(0.86, 0.93) if left else rng.uniform(0.04, 0.1)
    markers = [Marker(text="L" if left else "R", x=x, y=rng.uniform(0.06, 0.16), height=rng.uniform(0.9, 1.4))]
    if position == "AP" and rng.random() < 0.6:
        word = str(rng.choice(["AP", "PORTABLE", "SUPINE", "ERECT"]))
        markers.append(Marker(text=word, x=0.05 if left else 0.78, y=rng.uniform(0.04, 0.1), height=0.55))
    return tuple(markers)


def at_site(exposure: Exposure, markers: tuple[Marker, ...], site: int) -> tuple[Exposure, tuple[Marker, ...]]:
    """Return the exposure and the markers of a view at a site; site 0 does not change them.

    A site has its own tube voltage, tone curve, processing, noise and background, and its letters in every image.
    """
    if site == 0:
        return exposure, markers
    rng = generator(site, _SITE_STREAM)
    sign = float(rng.choice((-1, 1)))
    changed = dataclasses.replace(
        exposure,
        penetration=exposure.penetration * (1 + sign * float(rng.uniform(0.12, 0.25))),
        contrast=float(np.clip(exposure.contrast - sign * rng.uniform(0.1, 0.25), 0, 0.7)),
        equalize=float(np.clip(exposure.equalize + rng.uniform(0.1, 0.4), 0, 0.7)),
        noise=exposure.noise * float(rng.uniform(1.5, 3)),
        black=exposure.black + float(rng.uniform(0.02, 0.1)),
    )
    x, y = float(rng.choice((0.04, 0.8))), float(rng.uniform(0.9, 0.96))
    return changed, (*markers, Marker(text=f"H{site}", x=x, y=y, height=0.9))
