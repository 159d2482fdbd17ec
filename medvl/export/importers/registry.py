"""All importers of published checkpoints, by name."""

import difflib
from collections.abc import Mapping, Sequence

from medvl.errors import ConfigError
from medvl.export.importers import (
    albef,
    biovil,
    dual_encoders,
    encoders_only,
    fusion_encoders,
    knowledge,
    language,
    lvit,
    masked_records,
    queries,
    report_generators,
    statements,
)
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import count_covered

_IMPORTERS: Mapping[str, Importer] = {
    importer.name: importer
    for importer in sorted(
        (
            *albef.IMPORTERS,
            *biovil.IMPORTERS,
            *dual_encoders.IMPORTERS,
            *fusion_encoders.IMPORTERS,
            *knowledge.IMPORTERS,
            *report_generators.IMPORTERS,
            *language.IMPORTERS,
            *lvit.IMPORTERS,
            *masked_records.IMPORTERS,
            *queries.IMPORTERS,
            *statements.IMPORTERS,
            *encoders_only.IMPORTERS,
        ),
        key=lambda importer: importer.name,
    )
}

NOT_IMPORTED: Mapping[str, str] = {
    "benchx_converters": "a table of conventions, not a file: BenchX's files are those of the systems that it names",
}
"""Published layouts without an importer, and the reason."""


def list_importers() -> list[Importer]:
    """Return all importers, sorted by name."""
    return list(_IMPORTERS.values())


def find_importer(name: str) -> Importer:
    """Return the importer of that name, or of `open_clip:NAME` for any model of open_clip.

    Raises:
        ConfigError: there is no such importer; the message names similar ones.
    """
    family, separator, model = name.partition(":")
    if family == "open_clip" and separator:
        return dual_encoders.open_clip_importer(model)
    if name in _IMPORTERS:
        return _IMPORTERS[name]
    if name in NOT_IMPORTED:
        raise ConfigError(f"{name} cannot be imported: {NOT_IMPORTED[name]}", "unsupported", field="system")
    near = difflib.get_close_matches(name, _IMPORTERS, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"choose one of {', '.join(_IMPORTERS)} and open_clip:NAME."
    raise ConfigError(f"no importer is called {name!r}: {hint}", "unknown_name", field="system")


def matching_importers(keys: Sequence[str]) -> list[str]:
    """Return the names of the importers whose tables cover all of these keys."""
    return [importer.name for importer in list_importers() if count_covered(keys, importer.table) == len(keys)]
