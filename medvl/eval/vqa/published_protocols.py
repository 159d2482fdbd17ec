"""Evaluation of the same answers by the protocols of published numbers."""

from collections.abc import Sequence

from medvl.errors import EvaluationError
from medvl.eval.core.results import format_value
from medvl.eval.vqa.baselines import QUESTION_ONLY
from medvl.eval.vqa.evaluate import ACCURACY, CEILING, MODEL, evaluate_answers
from medvl.eval.vqa.predictions import Predictions
from medvl.eval.vqa.protocol import PROTOCOL, PROTOCOLS, PUBLISHED_PROTOCOLS
from medvl.eval.vqa.question_set import VQAData

_COLUMNS = ("protocol", "n", "closed n", "overall", "closed", "open", "ceiling")


def published_protocols_table(data: VQAData, predictions: Predictions | None = None, *, split: str = "test") -> str:
    """Return a text table with one line per protocol, medvl's first; without predictions, of the question-only model.

    It has no intervals, because these numbers are only comparable to published ones, not to each other.
    """
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for name in (PROTOCOL, *PUBLISHED_PROTOCOLS):
        try:
            lines.append(_line(data, predictions, name, split))
        except EvaluationError as error:
            lines.append((name, *["-"] * (len(_COLUMNS) - 2), f"-  ({error})"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
    system = MODEL if predictions is not None else QUESTION_ONLY
    return "\n".join([f"{system}, by protocol:", *(_aligned(line, widths) for line in lines)])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers, last = line
    cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([name.ljust(widths[0]), *cells, last])


def _line(data: VQAData, predictions: Predictions | None, name: str, split: str) -> tuple[str, ...]:
    result = evaluate_answers(data, predictions, protocol=name, split=split, resamples=0).results
    subgroup = "" if predictions is not None else f"baseline: {QUESTION_ONLY}"
    rows = {target: result.row(ACCURACY, target, subgroup) for target in ("overall", "closed", "open")}
    sizes = str(rows["overall"].n), str(rows["closed"].n)
    ceiling = format_value(result.row(CEILING, "overall"))
    flaw = PROTOCOLS[name].flaw
    return (name, *sizes, *(format_value(row) for row in rows.values()), ceiling + (f"  {flaw}" if flaw else ""))
