"""All lines, the most important ones first."""

import fnmatch
from collections.abc import Sequence

from gpu_lines import clip, convirt, fusion, loading, losses, systems, text
from gpu_lines.line import Line

_ALL = (
    convirt.LINES
    | clip.LINES
    | losses.LINES
    | loading.LINES
    | text.LINES
    | fusion.LINES
    | systems.LINES
)
_ORDER = (
    *("convirt", "gloria", "info-nce", "loader", "nvjpeg", "clip-b32", "convirt-lengths", "bert"),
    *("m3ae", "medvill", "decoding", "clip-b16", "attention-dropout", "convirt-frozen", "systems"),
)
LINES: tuple[Line, ...] = tuple(_ALL[name] for name in _ORDER)


def select(patterns: Sequence[str], lines: Sequence[Line] = LINES) -> list[Line]:
    """Return the lines whose names match one of the patterns; all but the optional ones without a
    pattern.

    Raises ValueError for a pattern that matches none.
    """
    if not patterns:
        return [line for line in lines if not line.optional]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(line.name, pattern) for line in lines):
            raise ValueError(
                f"no line matches {pattern!r}; choose from {', '.join(line.name for line in lines)}"
            )
    return [
        line
        for line in lines
        if any(fnmatch.fnmatchcase(line.name, pattern) for pattern in patterns)
    ]


def targets(lines: Sequence[Line] = LINES) -> str:
    """Return the table of targets as Markdown."""
    rows = [
        f"| `{line.name}` | {line.measures} | {'; '.join(map(str, line.goals)) or 'none'} | "
        f"{line.stock} | "
        f"{line.seconds:.0f}{', optional' if line.optional else ''} |"
        for line in lines
    ]
    head = "| line | what it measures | target | stock figure on one H200 | seconds |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])
