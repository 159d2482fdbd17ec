"""A self-contained HTML page of an evaluation, put together from sections.

One file: styles and pictures are inside it, it runs no script and its own policy forbids loading anything. All text is
escaped. An evaluator lists sections (tables, plots, galleries of images) and `write_page` lays them out.
"""

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.common.files import write_atomic
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import format_value

_TEMPLATES = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of a table: text, and a bar where there is an interval in [0, 1] to draw."""

    text: str
    small: str = ""
    """Beneath or beside the text: an interval."""
    bar: tuple[float, float, float] | None = None
    """(low, value, high)."""
    reference: float | None = None
    """Where a model that knows nothing would be: a tick in the bar."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The first column names the row; `strong_rows` of them, from the top, are summaries."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    strong_rows: int = 0
    kind: str = "table"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image with its alternative text and a few short lines beneath."""

    source: str
    """A data URI, as `png_uri` and `thumbnail_uri` make it."""
    alternative: str
    lines: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Pictures side by side under one heading."""

    title: str
    pictures: Sequence[Picture]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Strips of plots ("plots", "wide") or of small images ("thumbnails")."""

    title: str
    strips: Sequence[Strip]
    caption: str = ""
    kind: str = "plots"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of the answers that were open to a model."""

    text: str
    score: float | None
    """As it is written; None where there is none."""
    right: bool
    full: float = 1.0
    """The score whose bar is full."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A case: pictures, what was asked, what was said and what is true."""

    title: str
    pictures: Sequence[Picture]
    choices: Sequence[Choice]
    """The one that was taken first."""
    lines: Sequence[tuple[str, str]]
    """(name, value)."""
    tags: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deck:
    """Cards of one kind under one heading."""

    title: str
    cards: Sequence[Card]
    good: bool
    """Whether the cards show successes or failures, for their color."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """Single cases, put together in decks."""

    title: str
    decks: Sequence[Deck]
    caption: str = ""
    kind: str = "cards"


Section = Table | Pictures | Cards


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What `write_page` lays out, from top to bottom."""

    title: str
    subtitle: str
    headlines: Sequence[tuple[str, str, str]]
    """(what, number, interval or unit): the few numbers to remember."""
    facts: Sequence[tuple[str, str]]
    """(name, value): what was evaluated, and how."""
    sections: Sequence[Section]
    limits: Sequence[str]
    """What the numbers do not say; one paragraph each."""


def write_page(page: Page, path: str | Path) -> Path:
    """Write the page as one HTML file, whole or not at all; its path."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("page.html").render(page=page)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, html)


def metric_cell(row: MetricRow | None, *, reference: float | None = None, bar: bool = False) -> Cell:
    """A metric with its interval; a dash where it has no value."""
    text, _, interval = format_value(row).partition(" ")
    if row is None or text == "-":
        return Cell(text="–")
    drawn = (row.low, row.value, row.high) if bar and interval else None
    return Cell(text=text, small=interval, bar=drawn, reference=reference)


def png_uri(png: bytes) -> str:
    """A PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thumbnail_uri(pixels: NDArray[np.uint8], size: int = 192) -> str:
    """An image (H, W) or (H, W, 3), shrunk to fit a square of `size` pixels, as a JPEG data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(shrink(pixels, size)).save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shrink(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """An image (H, W) or (H, W, 3), no longer than `size` pixels on either side; a smaller one stays as it is."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return np.asarray(image)
