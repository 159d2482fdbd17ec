"""Self-contained HTML page of an evaluation, composed of sections.

The page is one file with embedded styles and pictures. It runs no script, and its content security policy forbids
loading anything. All text is escaped. Evaluators list sections (tables, plots, galleries), `write_page` renders them.
"""

import base64
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.common.files import write_atomic
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import format_value

Pixels = Callable[[int], NDArray[np.uint8]]
"""Position in the source -> stored image."""
_TEMPLATES = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Table cell: text, and optionally a bar for an interval in [0, 1]."""

    text: str
    small: str = ""
    """Small text after the text: an interval."""
    bar: tuple[float, float, float] | None = None
    """(low, value, high) of the bar; None for no bar."""
    reference: float | None = None
    """Chance level, drawn as a tick in the bar."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Table whose first column names the row; the first `strong_rows` rows are summaries."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    strong_rows: int = 0
    kind: str = "table"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Image with alternative text and a few short lines below it."""

    source: str
    """Data URI from `png_uri` or `thumbnail_uri`."""
    alternative: str
    lines: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Row of pictures under one heading."""

    title: str
    pictures: Sequence[Picture]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Section of strips of plots ("plots", "wide") or small images ("thumbnails")."""

    title: str
    strips: Sequence[Strip]
    caption: str = ""
    kind: str = "plots"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One candidate answer of a model."""

    text: str
    score: float | None
    """Score shown with a bar; None for neither."""
    right: bool
    full: float = 1.0
    """Score of a full bar."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Example: pictures, question, predictions and ground truth."""

    title: str
    pictures: Sequence[Picture]
    choices: Sequence[Choice]
    """Candidate answers, the prediction first."""
    lines: Sequence[tuple[str, str]]
    """(name, value) pairs."""
    tags: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deck:
    """Cards of one kind under one heading."""

    title: str
    cards: Sequence[Card]
    good: bool
    """Whether the cards show successes (green) or failures (red)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """Section of decks of cards."""

    title: str
    decks: Sequence[Deck]
    caption: str = ""
    kind: str = "cards"


Section = Table | Pictures | Cards


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Content of a page, from top to bottom."""

    title: str
    subtitle: str
    headlines: Sequence[tuple[str, str, str]]
    """(title, number, interval or unit) of the main results."""
    facts: Sequence[tuple[str, str]]
    """(name, value) pairs that describe data, model and protocol."""
    sections: Sequence[Section]
    limits: Sequence[str]
    """Limitations, one paragraph each."""


def write_page(page: Page, path: str | Path) -> Path:
    """Write the page atomically as one HTML file and return its path."""
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
    """Return the cell of a metric with its interval; a dash without a value."""
    text, _, interval = format_value(row).partition(" ")
    if row is None or text == "-":
        return Cell(text="–")
    ends = (row.low, row.value, row.high) if bar and interval else None
    return Cell(text=text, small=interval, bar=ends, reference=reference)


def png_uri(png: bytes) -> str:
    """Return a PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thumbnail_uri(pixels: NDArray[np.uint8], size: int = 192) -> str:
    """Return an image (H, W) or (H, W, 3), downscaled to at most `size` pixels a side, as a JPEG data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(shrink(pixels, size)).save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def shrink(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Downscale an image (H, W) or (H, W, 3) to at most `size` pixels a side; smaller ones are unchanged."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return np.asarray(image)
