"""Page of image-text matching: the metrics, and images that prefer another text or the mirror of their own."""

from pathlib import Path

import numpy as np

from medvl.eval.core.publish import PageHeader
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import Card, Cards, Choice, Deck, Page, Picture, Pixels, Section, thumbnail_uri, write_page
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.matching.evaluate import MIRROR, OTHER, OWN, MatchingResult

_LIMITS = (
    "A research evaluation, not for clinical use.",
    "The other text may fit the image as well as its own: normal studies have similar reports.",
)
_ROWS = {
    "above_other": "Own text above another patient's",
    "above_mirror": "Own text above its mirror",
    "accuracy": "Decisions of the matching head",
}


def write_matching_page(
    result: MatchingResult, path: str | Path, header: PageHeader, *, pixels: Pixels | None = None, examples: int = 4
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `image_text_matching`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels: function from the position of an image to its pixels; None for no images.
        examples: images of each kind of mistake.
    """
    results = result.results
    rows = [row for row in results.rows if row.n]
    sections: list[Section] = [
        Table(
            title="Summary",
            columns=["", "Share", "Images"],
            rows=[[_ROWS[row.metric], metric_cell(row, reference=0.5, bar=True), f"{row.n:,}"] for row in rows],
            caption="Mirrors have left and right exchanged; only texts that name a side have one. The tick is chance.",
        )
    ]
    if pixels is not None:
        sections.append(_mistakes(result, pixels, examples))
    page = Page(
        title=f"Image-text matching: {header.model}",
        subtitle=f"{header.data}: {results.details['images']:,} images, "
        f"{results.details['naming_a_side']:,} with a text that names a side",
        headlines=[headline(_ROWS[row.metric].lower(), row) for row in rows],
        facts=header_facts(results, header, units="patients"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _mistakes(result: MatchingResult, pixels: Pixels, examples: int) -> Cards:
    decks = []
    for title, column in (("Another text scored higher", OTHER), ("The mirror scored higher", MIRROR)):
        wrong = np.flatnonzero(result.scores_N3[:, column] > result.scores_N3[:, OWN])
        shown = wrong[np.linspace(0, len(wrong) - 1, min(examples, len(wrong))).astype(int)]
        if len(shown):
            cards = [_card(result, int(row), column, pixels) for row in shown]
            decks.append(Deck(title=f"{title}: {len(wrong):,} images", cards=cards, good=False))
    caption = "The text that scored higher, then the image's own (✓); evenly spaced in the order of the data."
    return Cards(title="Mistakes", decks=decks, caption=caption)


def _card(result: MatchingResult, row: int, column: int, pixels: Pixels) -> Card:
    scores_3, full = result.scores_N3[row], float(max(1.0, np.nanmax(np.abs(result.scores_N3))))
    margin = f"{scores_3[column] - scores_3[OWN]:.2f}"
    alternative = f"image whose own text scores {scores_3[OWN]:.2f} and the other text {scores_3[column]:.2f}"
    return Card(
        title=f"Preferred by {margin}",
        pictures=[Picture(source=thumbnail_uri(pixels(result.positions[row]), 256), alternative=alternative)],
        choices=[
            Choice(text=result.text(row, place), score=float(scores_3[place]), right=place == OWN, full=full)
            for place in (column, OWN)
        ],
        lines=[],
        tags=[],
    )
