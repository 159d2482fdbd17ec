"""Self-contained HTML page of an evaluation, composed of sections.

The page is one file with embedded styles and pictures. It runs no script, and its content security
policy forbids loading anything. All text is escaped. Evaluators list sections (tables, plots,
galleries), `write_page` renders them: the first section is the summary, and sections beyond about
four screens are folded. Beside `index.html`, the folder `index_files` has every table as CSV,
Markdown and LaTeX, every plot as SVG and PDF, and every picture of the galleries and heat maps as
JPEG.
"""

import base64
import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.common.files import subfolder, write_atomic
from medvl.common.text_files import csv_text
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader, Results, format_value
from medvl.eval.html.plots import Plot
from medvl.eval.html.tables import Table, as_csv, as_latex, as_markdown

# Header of the pages: headline numbers, and the facts about data, model and protocol.


def headline(title: str, row: MetricRow) -> tuple[str, str, str]:
    """Return (title, number, interval) for `Page.headlines`; "-" without an interval if the row
    has no value.
    """
    number, _, interval = format_value(row).partition(" ")
    return title, number, interval


def header_facts(
    results: Results, header: PageHeader, *, units: str, extra: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return (name, value) pairs about data, model and protocol, for `Page.facts`.

    Args:
        results: results of the evaluation.
        header: names of model and data, and the date.
        units: units that the bootstrap resampled, in the plural: patients, texts, ...
        extra: facts of this kind of evaluation.
    """
    config = results.config
    facts = [
        ("Checkpoint", hashed(header.model, results.inputs.get("checkpoint"))),
        ("Data", hashed(header.data, results.inputs.get("manifest"))),
        *extra,
        ("Intervals", f"95%, {config['resamples']:,} resamples of {units}, seed {config['seed']}"),
        ("Protocol", f"{results.protocol}, version {results.protocol_version}"),
        ("Software", software(results)),
    ]
    return dated(header.date, facts)


def hashed(name: str, sha256: str | None) -> str:
    """Return a name followed by the start of its hash, if known."""
    return f"{name} (sha256 {sha256[:12]})" if sha256 else name


def software(results: Results) -> str:
    """Return the versions of medvl and torch of the evaluation."""
    return f"medvl {results.packages['medvl']}, torch {results.packages.get('torch', '?')}"


def dated(date: str | None, facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the facts, with the date first if there is one."""
    return [("Date", date), *facts] if date else list(facts)


# Files of a page's galleries and heat maps: each picture as a JPEG file, and a list of their
# descriptions.

JPEG = "data:image/jpeg;base64,"
_COLUMNS = ("file", "group", "alternative text", "lines", "color scale")


def picture_files(
    sections: Sequence[Any], names: Sequence[str]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files of the pictures that are not plots, and the name of a picture's file by its
    data URI.

    Pictures are named after their section and numbered in its order; `NAME-pictures.csv` has for
    each its heading, its alternative text, the lines below it, and the values at the ends of a heat
    map's colors.

    Args:
        sections: sections of a page.
        names: their names in file names.
    """
    files: dict[str, bytes] = {}
    name_of: dict[str, str] = {}
    for section, name in zip(sections, names, strict=True):
        rows: list[tuple[str, ...]] = []
        for group, picture in _pictures(section):
            if not picture.source.startswith(JPEG):
                continue
            if picture.source not in name_of:
                name_of[picture.source] = f"{name}-{len(rows) + 1:03d}.jpg"
                files[name_of[picture.source]] = base64.b64decode(picture.source.removeprefix(JPEG))
            scale = "" if picture.scale is None else f"{picture.scale.low} to {picture.scale.high}"
            rows.append(
                (
                    name_of[picture.source],
                    group,
                    picture.alternative,
                    " | ".join(picture.lines),
                    scale,
                )
            )
        if rows:
            files[f"{name}-pictures.csv"] = csv_text([_COLUMNS, *rows]).encode()
    return files, name_of


def _pictures(section: Any) -> Iterator[tuple[str, Any]]:
    """Yield (heading, picture) of strips and cards."""
    for strip in getattr(section, "strips", ()):
        yield from ((strip.title, picture) for picture in strip.pictures)
    for deck in getattr(section, "decks", ()):
        yield from (
            (f"{deck.title}: {card.title}", picture)
            for card in deck.cards
            for picture in card.pictures
        )


Pixels = Callable[[int], NDArray[np.uint8]]
"""Position in the source -> stored image."""
_TEMPLATES = Path(__file__).parent / "templates"
# estimated height of the sections that are not folded: about four screens with the header
_OPEN_PIXELS = 3500
_LONG_TEXT = 160  # characters; longer texts are shown by their beginning and open to the full text
_TABLE_FORMATS = {"csv": as_csv, "md": as_markdown, "tex": as_latex}
_PLOT_FORMATS = ("svg", "pdf")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ColorScale:
    """Values at the two ends of a heat map's colors."""

    low: str
    high: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Image, or a plot, with alternative text and a few short lines below it."""

    source: str
    """Data URI from `thumbnail_uri`, or of the plot (`plot_picture`)."""
    alternative: str
    """Description for readers who cannot see the picture."""
    lines: Sequence[str] = ()
    scale: ColorScale | None = None
    plot: Plot | None = None
    """Plot that is also written as a file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Row of pictures under one heading."""

    title: str
    pictures: Sequence[Picture]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Section of strips of plots ("plots", "wide", "grid" of strips) or small images
    ("thumbnails").
    """

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
    """The first is the summary."""
    limits: Sequence[str]
    """Limitations, one paragraph each."""
    findings: Sequence[str] = ()
    """Names to filter by: rows of tables, and strips, of other findings are hidden."""
    pages: Sequence[tuple[str, str]] = ()
    """(title, file) of the pages of a site, for links at the top."""


def write_page(page: Page, path: str | Path) -> Path:
    """Write the page and its files atomically, and return the path of the page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path = Path(path)
    ids = _ids([section.title for section in page.sections])
    pictures, picture_names = picture_files(page.sections, ids)
    files = {**_table_files(page), **_plot_files(page), **pictures}
    html = environment.get_template("page.html").render(
        page=page,
        ids=ids,
        files=files,
        picture_names=picture_names,
        folded=_folded(page.sections),
        folder=_folder(path).name,
        found={name: number for number, name in enumerate(page.findings)},
        long_text=_LONG_TEXT,
        table_formats=("csv", "md", "tex"),
        plot_formats=_PLOT_FORMATS,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_files(_folder(path), files)
    return write_atomic(path, html)


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.stem}_files")


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files into their own folder, and remove those of an earlier page."""
    if files:
        subfolder(folder.parent, folder.name)
    if folder.is_dir() and not folder.is_symlink():
        for old in folder.iterdir():
            if old.name not in files and old.suffix[1:] in {*_TABLE_FORMATS, *_PLOT_FORMATS, "jpg"}:
                old.unlink()
    for name, content in files.items():
        write_atomic(folder / name, content)


def _table_files(page: Page) -> dict[str, bytes]:
    named = zip(_ids([section.title for section in page.sections]), page.sections, strict=True)
    tables = [(name, section) for name, section in named if isinstance(section, Table)]
    return {
        f"{name}.{suffix}": write(table).encode()
        for name, table in tables
        for suffix, write in _TABLE_FORMATS.items()
    }


def _plot_files(page: Page) -> dict[str, bytes]:
    strips = [
        strip
        for section in page.sections
        if isinstance(section, Pictures)
        for strip in section.strips
    ]
    plots = [
        picture.plot for strip in strips for picture in strip.pictures if picture.plot is not None
    ]
    return {
        f"{plot.name}.{suffix}": getattr(plot, suffix) for plot in plots for suffix in _PLOT_FORMATS
    }


def _ids(titles: Sequence[str]) -> list[str]:
    """Return a unique name of letters, digits and hyphens for each title."""
    names: list[str] = []
    for title in titles:
        name = slug(title)
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def slug(text: str) -> str:
    """Return a name for files and anchors: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "section"


def _folded(sections: Sequence[Section]) -> list[bool]:
    """Return which sections are folded: those that do not fit into the first screens, and never
    the summary.
    """
    left = float(_OPEN_PIXELS)
    folded = []
    for number, section in enumerate(sections):
        height = _height(section)
        folded.append(number > 0 and height > left)
        left -= 60 if folded[-1] else height
    return folded


def _height(section: Section) -> float:
    """Return the estimated height in pixels at a width of 1,100."""
    if isinstance(section, Table):
        bars = any(axis is not None for axis in section.axes())
        return 190 + (62 if bars else 50) * len(section.rows)
    if isinstance(section, Cards):
        longest = max(
            (len(card.choices) for deck in section.decks for card in deck.cards), default=0
        )
        return 120 + sum(
            50 + (230 + 80 * longest) * ((len(deck.cards) + 1) // 2) for deck in section.decks
        )
    if section.kind == "thumbnails":
        return 120 + 95 * len(section.strips)
    if section.kind == "grid":
        return 120 + 360 * ((len(section.strips) + 2) // 3)
    row = 620 if section.kind == "wide" else 330
    return 120 + sum(30 + row * ((len(strip.pictures) + 2) // 3) for strip in section.strips)


def plot_picture(plot: Plot, *, alternative: str, lines: Sequence[str] = ()) -> Picture:
    """Return the picture of a plot."""
    source = "data:image/svg+xml;base64," + base64.b64encode(plot.svg).decode()
    return Picture(source=source, alternative=alternative, lines=lines, plot=plot)


def thumbnail_uri(pixels: NDArray[np.uint8], size: int = 192) -> str:
    """Return an image (H, W) or (H, W, 3), downscaled to at most `size` pixels a side, as a JPEG
    data URI.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(shrink(pixels, size)).save(buffer, "JPEG", quality=82)
    return JPEG + base64.b64encode(buffer.getvalue()).decode()


def shrink(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Downscale an image (H, W) or (H, W, 3) to at most `size` pixels a side; smaller ones are
    unchanged.
    """
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return np.asarray(image)
