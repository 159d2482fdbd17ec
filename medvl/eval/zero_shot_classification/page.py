"""Page of a zero-shot evaluation: tables, curves, subgroups, and images with extreme scores."""

from pathlib import Path

from medvl.eval.classification.page import LIMITS, facts, headlines, sections, subtitle
from medvl.eval.core.publish import PageHeader
from medvl.eval.html.header import hashed
from medvl.eval.html.page import Page, Pixels, write_page
from medvl.eval.zero_shot_classification.evaluate import ZeroShotResult


def write_zero_shot_page(
    result: ZeroShotResult, path: str | Path, header: PageHeader, *, pixels: Pixels | None = None, examples: int = 3
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `zero_shot`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels: function from position to image, such as `loader.source.pixels`; None for no images.
        examples: images of each kind per finding.
    """
    page = Page(
        title=f"Zero-shot findings: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=headlines(result),
        facts=facts(result, header, extra=_prompt_facts(result)),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
        findings=result.images.names,
    )
    return write_page(page, path)


def _prompt_facts(result: ZeroShotResult) -> list[tuple[str, str]]:
    prompts, results = result.prompts, result.results
    return [
        ("Prompts", hashed(f"{prompts.name}, version {prompts.version}", results.inputs.get("prompts"))),
        ("Score", _scoring(prompts.scoring, prompts.temperature, prompts.ensemble)),
    ]


def _scoring(scoring: str, temperature: float, ensemble: str) -> str:
    rule = {
        "pair_softmax": f"softmax of positive and negative similarity, temperature {temperature:g}",
        "class_softmax": f"softmax over the classes, temperature {temperature:g}",
        "margin": "positive minus negative similarity",
        "positive": "positive similarity",
        "gloria_best_word": "GLoRIA's similarity by the best word, standardised over these images",
        "gloria_published": "GLoRIA's published similarity, which counts characters as words, standardised over these "
        "images",
    }[scoring]
    return f"{rule}; sentences by {ensemble.replace('_', ' ')}"
