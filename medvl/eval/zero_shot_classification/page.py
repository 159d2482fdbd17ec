"""The page of a zero-shot evaluation: tables, curves, subgroups, and the images it was surest about."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.eval.classification.page import LIMITS, facts, headlines, sections, subtitle
from medvl.eval.html.header import hashed
from medvl.eval.html.page import Page, write_page
from medvl.eval.zero_shot_classification.evaluate import ZeroShotResult


def write_zero_shot_page(
    result: ZeroShotResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: Callable[[int], NDArray[np.uint8]] | None = None,
    examples: int = 3,
) -> Path:
    """Write the page as one HTML file; its path.

    Args:
        result: what `zero_shot` returned.
        path: of the file; its folder is made where it is missing.
        model, data: what they are called in the header.
        date: shown as it stands; the library reads no clock.
        pixels: position -> image, as `loader.source.pixels`; None leaves the images out.
        examples: images of each kind for a finding.
    """
    page = Page(
        title=f"Zero-shot findings: {model}",
        subtitle=subtitle(result, data),
        headlines=headlines(result),
        facts=facts(result, model=model, data=data, date=date, own=_own_facts(result)),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
    )
    return write_page(page, path)


def _own_facts(result: ZeroShotResult) -> list[tuple[str, str]]:
    prompts, results = result.prompts, result.results
    told = [
        ("Prompts", hashed(f"{prompts.name}, version {prompts.version}", results.inputs.get("prompts"))),
        ("Score", _scoring(prompts.scoring, prompts.temperature, prompts.ensemble)),
    ]
    if results.details["classes_without_labels"]:
        told.append(("Not judged", "no labels for " + ", ".join(results.details["classes_without_labels"])))
    return told


def _scoring(scoring: str, temperature: float, ensemble: str) -> str:
    rule = {
        "pair_softmax": f"softmax of positive and negative similarity, temperature {temperature:g}",
        "class_softmax": f"softmax over the classes, temperature {temperature:g}",
        "margin": "positive minus negative similarity",
        "gloria_published": "GLoRIA's published similarity, standardised over these images",
    }[scoring]
    return f"{rule}; sentences by {ensemble.replace('_', ' ')}"
