"""The page of an image-text retrieval: its numbers beside chance, what queries found, similarities and embeddings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.metrics import Array
from medvl.eval.html import plots
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import (
    Card,
    Cards,
    Cell,
    Choice,
    Deck,
    Page,
    Picture,
    Pictures,
    Section,
    Strip,
    Table,
    metric_cell,
    png_uri,
    thumbnail_uri,
    write_page,
)
from medvl.eval.retrieval.examples import Found, RetrievalView
from medvl.eval.retrieval.image_text import RetrievalResult

_DIRECTIONS = {"image_to_text": "Image to text", "text_to_image": "Text to image"}
_LONGEST = 140
"""Characters of a text that are shown."""
_FINDINGS = 2
_FEWEST = 5
"""Images with a finding, and without, that it takes to be shown in the plane."""
LIMITS = (
    "A research evaluation, not for clinical use: a text that is found in place of an image's own can say the same in "
    "other words, and counts as wrong all the same.",
    "Intervals are percentiles of a bootstrap over texts, with all their images. Recall falls as the gallery grows: "
    "compare numbers over one gallery only.",
    "Images and texts on this page belong to the data set and stay under its terms of use.",
)


def write_retrieval_page(
    result: RetrievalResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: Callable[[str], NDArray[np.uint8]] | None = None,
    labels: Callable[[str], Mapping[str, int]] | None = None,
) -> Path:
    """Write the page as one HTML file; its path.

    Args:
        result: what `image_text_retrieval` returned; its view, where it has one, is drawn.
        path: of the file; its folder is made where it is missing.
        model, data: what they are called in the header.
        date: shown as it stands; the library reads no clock.
        pixels: key -> image; None leaves the images out.
        labels: key -> labels, by which the embeddings are colored.
    """
    details = result.results.details
    sections: list[Section] = [_table(result)]
    if result.view is not None:
        sections.append(_plots(result, result.view, labels))
        if pixels is not None:
            sections += [_of_images(result, result.view, pixels), _of_texts(result, result.view, pixels)]
    own = [("Equal texts", "one text, with several images")]
    page = Page(
        title=f"Image-text retrieval: {model}",
        subtitle=f"{data}: {details['images']:,} images and {details['texts']:,} distinct texts",
        headlines=[_headline(result, direction) for direction in _DIRECTIONS],
        facts=header_facts(result.results, model=model, data=data, date=date, units="texts", extra=own),
        sections=sections,
        limits=LIMITS,
    )
    return write_page(page, path)


def _middle_metric(result: RetrievalResult) -> str:
    ks = sorted(result.results.config["ks"])
    return f"recall@{ks[len(ks) // 2]}"


def _headline(result: RetrievalResult, direction: str) -> tuple[str, str, str]:
    metric = _middle_metric(result)
    return headline(f"{metric}, {_DIRECTIONS[direction].lower()}", result.results.row(metric, direction))


def _table(result: RetrievalResult) -> Table:
    chance: Mapping[str, float] = result.results.details["chance"]
    recalls = [f"recall@{k}" for k in result.results.config["ks"]]
    lines: list[Sequence[Cell | str]] = []
    for direction, told in _DIRECTIONS.items():
        rows = {metric: result.results.row(metric, direction) for metric in (*recalls, "median_rank")}
        cells = [metric_cell(rows[each], reference=chance[f"{each}/{direction}"], bar=True) for each in recalls]
        lines.append([told, *cells, metric_cell(rows["median_rank"]), f"{rows['median_rank'].n:,}"])
    return Table(
        title="Recall",
        columns=["", *(metric.capitalize() for metric in recalls), "Median rank", "Queries"],
        rows=lines,
        caption="The share of queries whose own text, or image, is among the first k, with 95% intervals. The tick in "
        "a bar is a random order.",
    )


def _plots(result: RetrievalResult, view: RetrievalView, labels: Callable[[str], Mapping[str, int]] | None) -> Pictures:
    count = len(view.similarity_KK)
    matrix = Picture(
        source=png_uri(plots.matrix_plot(view.similarity_KK, "text", "image")),
        alternative=f"similarities of {count} images with their texts",
        lines=["Similarities", f"{count} images drawn at random, each with its own text on the diagonal"],
    )
    sides = {"images": view.image_N2, "texts": view.text_M2}
    colors = {"images": plots.LINE_COLOR, "texts": plots.POSITIVE_COLOR}
    pictures = [matrix, _plane("Images and texts", sides, colors, view)]
    for name, of_image_N in _colored(result, view, labels):
        sides = {"without": view.image_N2[of_image_N == 0], "with": view.image_N2[of_image_N == 1]}
        colors = {"without": plots.NEGATIVE_COLOR, "with": plots.POSITIVE_COLOR}
        pictures.append(_plane(name, sides, colors, view))
    return Pictures(
        title="Similarities and embeddings",
        strips=[Strip(title="", pictures=pictures)],
        caption="Embeddings lie in the plane of the two main directions of images and texts together (PCA). Where the "
        "two lie apart, as they often do, retrieval compares them across that gap.",
    )


def _plane(name: str, sides: Mapping[str, Array], colors: Mapping[str, str], view: RetrievalView) -> Picture:
    plot = plots.points_plot(sides, colors, tuple(f"direction {n} ({s:.0%})" for n, s in enumerate(view.spread, 1)))
    return Picture(source=png_uri(plot), alternative=f"embeddings in a plane: {name}", lines=[name])


def _colored(
    result: RetrievalResult, view: RetrievalView, labels: Callable[[str], Mapping[str, int]] | None
) -> list[tuple[str, NDArray[np.int64]]]:
    """The findings that divide the images of the plane most evenly, with 1 for each that has it."""
    if labels is None:
        return []
    known = [labels(result.keys[number]) for number in view.shown_N.tolist()]
    names = sorted({name for row in known for name in row})
    columns = [(name, np.array([int(row.get(name) == 1) for row in known])) for name in names]
    smaller = {name: min(int(values.sum()), int((1 - values).sum())) for name, values in columns}
    order = sorted(columns, key=lambda column: (-smaller[column[0]], column[0]))
    return [column for column in order if smaller[column[0]] >= _FEWEST][:_FINDINGS]


def _of_images(result: RetrievalResult, view: RetrievalView, pixels: Callable[[str], NDArray[np.uint8]]) -> Cards:
    # most similarities are cosines; GLoRIA's are not, and reach beyond 1
    full = max(1.0, *(value for found in view.of_images for value in found.similarities))

    def card(found: Found) -> Card:
        own, rank = int(view.text_of_N[found.query]), int(result.image_rank_N[found.query])
        choices = [
            Choice(text=_short(view.texts[text]), score=value, right=text == own, full=full)
            for text, value in zip(found.candidates, found.similarities, strict=True)
        ]
        picture = Picture(source=thumbnail_uri(pixels(result.keys[found.query]), 256), alternative="the image")
        return Card(
            title=f"Its own text comes {_ordinal(rank)} of {len(view.texts):,}",
            pictures=[picture],
            choices=choices,
            lines=[] if own in found.candidates else [("Its own", _short(view.texts[own]))],
            tags=[],
        )

    right = [int(view.text_of_N[found.query]) in found.candidates for found in view.of_images]
    decks = [
        Deck(title=title, good=good, cards=[card(f) for f, r in zip(view.of_images, right, strict=True) if r == good])
        for title, good in (("Own text among the first", True), ("Own text not among the first", False))
    ]
    return Cards(
        title="Texts that images found",
        decks=[deck for deck in decks if deck.cards],
        caption="Images drawn at random, with the nearest texts of the gallery and their similarities.",
    )


def _of_texts(result: RetrievalResult, view: RetrievalView, pixels: Callable[[str], NDArray[np.uint8]]) -> Pictures:
    def picture(image: int, similarity: float, text: int) -> Picture:
        own = "✓ its own" if int(view.text_of_N[image]) == text else "of another text"
        source = thumbnail_uri(pixels(result.keys[image]))
        return Picture(source=source, alternative="an image that was found", lines=[own, f"{similarity:.2f}"])

    strips = [
        Strip(
            title=_short(view.texts[found.query]),
            note=f"own image {_ordinal(int(result.text_rank_M[found.query]))} of {len(view.text_of_N):,}",
            pictures=[
                picture(image, similarity, found.query)
                for image, similarity in zip(found.candidates, found.similarities, strict=True)
            ],
        )
        for found in view.of_texts
    ]
    return Pictures(
        title="Images that texts found",
        kind="thumbnails",
        strips=strips,
        caption="Texts drawn at random, with the nearest images of the gallery and their similarities.",
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2].rsplit(" ", 1)[0] + " …"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"
