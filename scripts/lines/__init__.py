"""The lines of the benchmark: one module per area, each with its `LINES`.

A line is a function that measures medvl beside a peer and returns a report. To add one, write the
function and a `Line` in the module of its area, or in a new module of this folder.
"""

import difflib
import fnmatch
import importlib
import pkgutil
from collections.abc import Mapping, Sequence

from measure.line import Line


def read_lines() -> dict[str, Line]:
    """Return all lines by name, those of a CPU first. Raises ValueError for a repeated name."""
    found: list[Line] = []
    for module in pkgutil.iter_modules(__path__):
        found += importlib.import_module(f"{__name__}.{module.name}").LINES
    names = [line.name for line in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"expected one line of each name, got several of {sorted(repeated)}")
    return {line.name: line for line in sorted(found, key=lambda line: line.device)}


def select(patterns: Sequence[str], lines: Mapping[str, Line]) -> list[Line]:
    """Return the lines whose names match one of the patterns; all but the optional ones without a
    pattern.

    Raises ValueError for a pattern that matches none; the message lists names like it.
    """
    if not patterns:
        return [line for line in lines.values() if not line.optional]
    for pattern in patterns:
        if not fnmatch.filter(lines, pattern):
            near = difflib.get_close_matches(pattern, lines, n=3, cutoff=0.5)
            known = f"did you mean {' or '.join(near)}?" if near else "--list prints all lines"
            raise ValueError(f"expected the name of a line, got {pattern!r}; {known}")
    return [
        line
        for name, line in lines.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
