"""Published numbers of the systems that have a recipe, as data.

`published_numbers.json` has, for every recipe, rows of numbers or the reason why there are none.
Values have the unit of the source: percent, or a share of one. They are facts to compare with; none
of them was measured with medvl.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from medvl.common.config_io import nearest
from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError

_PATH = Path(__file__).parent / "published_numbers.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishedNumber:
    """One number, and the command that should reproduce it with the paper's weights and data."""

    recipe: str
    source: str
    """Paper and table, model card, or the comparison that it is quoted from."""
    dataset: str
    split: str
    metric: str
    value: float
    command: str
    checked: bool
    """Whether the number was verified in the source; others must be looked up before they are
    quoted.
    """
    note: str = ""


def published_numbers(recipe: str | None = None) -> list[PublishedNumber]:
    """Return the numbers of a recipe, by the name of its file, or of all recipes.

    Raises EvaluationError for a recipe that is not in the file; one with a reason instead of
    numbers returns none.
    """
    rows, reasons = _read()
    if recipe is not None and recipe not in (*rows, *reasons):
        message = (
            f"expected a recipe with published numbers, got {recipe!r}: "
            f"{nearest(recipe, [*rows, *reasons])}"
        )
        raise EvaluationError(message, "unknown_name", field="recipe")
    names = sorted(rows) if recipe is None else [recipe]
    return [PublishedNumber(recipe=name, **row) for name in names for row in rows.get(name, ())]


def without_numbers() -> dict[str, str]:
    """Return recipe -> why it has no published numbers."""
    return _read()[1]


def published_markdown(numbers: Iterable[PublishedNumber], reasons: dict[str, str]) -> str:
    """Return the numbers as Markdown, a section for each recipe, and the recipes without
    numbers.
    """
    by_recipe: dict[str, list[PublishedNumber]] = {}
    for number in numbers:
        by_recipe.setdefault(number.recipe, []).append(number)
    lines: list[str] = []
    for recipe, of_recipe in by_recipe.items():
        lines += [
            f"## {recipe}",
            "",
            "| Data | Split | Metric | Value | Source | Note |",
            "|---|---|---|---:|---|---|",
        ]
        for one in of_recipe:
            note = one.note if one.checked else "; ".join(filter(None, ["not checked", one.note]))
            cells = (one.dataset, one.split, one.metric, f"{one.value:g}", one.source, note)
            lines.append(f"| {' | '.join(cells)} |")
        commands = dict.fromkeys(one.command.replace(" && ", "\n") for one in of_recipe)
        steps = dict.fromkeys(step for command in commands for step in command.splitlines())
        lines += ["", "```bash", *steps, "```", ""]
    if reasons:
        lines += ["## Recipes without numbers", "", "| Recipe | Reason |", "|---|---|"]
        lines += [f"| {recipe} | {reason} |" for recipe, reason in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _read() -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    content = parse_json(_PATH.read_text(encoding="utf-8"))
    return content["rows"], content["reasons"]
