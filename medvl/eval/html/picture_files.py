"""Files of a page's galleries and heat maps: each picture as a JPEG file, and a list of their descriptions."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from medvl.common.csv_text import csv_text

JPEG = "data:image/jpeg;base64,"
_COLUMNS = ("file", "group", "alternative text", "lines", "color scale")


def picture_files(sections: Sequence[Any], names: Sequence[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files of the pictures that are not plots, and the name of a picture's file by its data URI.

    Pictures are named after their section and numbered in its order; `NAME-pictures.csv` has for each its heading, its
    alternative text, the lines below it, and the values at the ends of a heat map's colors.

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
            rows.append((name_of[picture.source], group, picture.alternative, " | ".join(picture.lines), scale))
        if rows:
            files[f"{name}-pictures.csv"] = csv_text([_COLUMNS, *rows]).encode()
    return files, name_of


def _pictures(section: Any) -> Iterator[tuple[str, Any]]:
    """Yield (heading, picture) of strips and cards."""
    for strip in getattr(section, "strips", ()):
        yield from ((strip.title, picture) for picture in strip.pictures)
    for deck in getattr(section, "decks", ()):
        yield from ((f"{deck.title}: {card.title}", picture) for card in deck.cards for picture in card.pictures)
