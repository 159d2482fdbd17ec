"""Page of text tasks: one table of all tasks beside their baselines, and examples of mistakes."""

from collections.abc import Sequence
from pathlib import Path

from medvl.data.text_tasks.tasks import TASKS, TextExample
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader
from medvl.eval.html.page import (
    Card,
    Cards,
    Deck,
    Page,
    Section,
    header_facts,
    headline,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.text_tasks.evaluate import TextTaskResult
from medvl.eval.text_tasks.metrics import entity_spans

_LIMITS = (
    "A research evaluation of a language encoder, not for clinical use.",
    "Intervals are over test examples; they do not include the choice of seeds or of training "
    "data.",
    "Test sets with few examples (BIOSSES 20, BioASQ 140) cannot separate encoders of similar "
    "quality.",
)
_NAMES = {
    "entity_f1": "entity F1",
    "macro_word_f1": "macro word F1",
    "micro_f1": "micro F1",
    "pearson": "Pearson",
    "accuracy": "accuracy",
}


def write_text_page(
    result: TextTaskResult, path: str | Path, header: PageHeader, *, examples: int = 5
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_text_tasks`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: mistakes shown for each task; 0 for none, such as for texts that may not be
            shared.
    """
    results = result.results
    tasks = list(result.runs)
    seeds = " or ".join(map(str, sorted({len(run.metrics) for run in result.runs.values()})))
    headlines = [
        headline(f"{name}, {_NAMES[TASKS[name].metric]}", _main_row(result, name))
        for name in tasks[:3]
    ]
    headlines = [headline(row.target, row) for row in _aggregate(result)[:1]] + headlines
    sections: list[Section] = [_score_table(result), _settings_table(result)]
    if examples:
        sections.append(_mistakes(result, examples))
    page = Page(
        title=f"Text tasks: {header.model}",
        subtitle=f"{header.data}; tasks: {len(tasks)}, seeds: {seeds}",
        headlines=headlines,
        facts=header_facts(results, header, units="documents"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _aggregate(result: TextTaskResult) -> list[MetricRow]:
    return [row for row in result.results.rows if row.metric == "blurb"]


def _main_row(result: TextTaskResult, name: str) -> MetricRow:
    return result.results.row(TASKS[name].metric, name)


def _score_table(result: TextTaskResult) -> Table:
    lines: list[Sequence[Cell | str]] = []
    for name in result.runs:
        metric = TASKS[name].metric
        of_task = [row for row in result.results.rows if row.metric == metric]
        for row in of_task:
            label, _, kind = row.target.partition(": ")
            if label == name:
                lines.append(
                    [
                        name if not kind else f"  {kind}",
                        _NAMES[metric],
                        metric_cell(row, bar=True),
                        f"{row.n:,}",
                    ]
                )
            elif row.target.startswith(f"{name} - "):
                lines.append(
                    [
                        f"  above {row.target.removeprefix(f'{name} - ')}",
                        "difference",
                        metric_cell(row),
                        "",
                    ]
                )
    lines += [[row.target, "BLURB", metric_cell(row), f"{row.n:,}"] for row in _aggregate(result)]
    caption = (
        "The mean over seeds with 95% intervals over test documents, then baselines that "
        "use no encoder."
    )
    return Table(
        title="Scores",
        columns=["", "Metric", "Score", "Test examples"],
        rows=lines,
        caption=caption,
    )


def _settings_table(result: TextTaskResult) -> Table:
    rows: list[Sequence[Cell | str]] = []
    for name in result.runs:
        for shown, run in ((name, result.runs[name]), ("  other encoder", result.others.get(name))):
            if run is not None:
                seeds = ", ".join(f"{metric():.3f}" for metric in run.metrics)
                dev = "not searched" if run.dev is None else f"{run.dev:.3f}"
                settings = run.settings
                rows.append(
                    [
                        shown,
                        f"{settings.lr:g}",
                        str(settings.batch),
                        str(settings.epochs),
                        dev,
                        seeds,
                    ]
                )
    return Table(
        title="Fine-tuning",
        columns=["", "Learning rate", "Batch", "Epochs", "Dev", "Test by seed"],
        rows=rows,
        caption="The settings with the best metric on the dev split, from the first seed.",
    )


def _mistakes(result: TextTaskResult, examples: int) -> Cards:
    decks = []
    for name, run in result.runs.items():
        guesses = run.predictions[0]
        wrong = [
            row
            for row, example in enumerate(result.examples[name])
            if guesses[row] != example.label
        ]
        if wrong and TASKS[name].kind != "similarity":
            shown = wrong[:: max(1, len(wrong) // examples)][:examples]
            cards = [_card(result.examples[name][row], guesses[row]) for row in shown]
            decks.append(
                Deck(title=f"{name}: {len(wrong):,} of {len(guesses):,}", cards=cards, good=False)
            )
    return Cards(
        title="Mistakes",
        decks=decks,
        caption="Of the first seed, evenly spaced in the order of the data.",
    )


def _card(example: TextExample, guess: str | float | tuple[str, ...]) -> Card:
    lines = [
        ("Text", _shown(example)),
        ("Label", _label(example, example.label)),
        ("Predicted", _label(example, guess)),
    ]
    return Card(title=example.key, pictures=(), choices=(), lines=lines, tags=())


def _shown(example: TextExample) -> str:
    words = isinstance(example.label, tuple) and len(example.label) == len(example.texts)
    text = " ".join(example.texts) if words else " | ".join(example.texts)
    return text if len(text) <= 240 else text[:239] + "…"


def _label(example: TextExample, label: str | float | tuple[str, ...]) -> str:
    """Return a label as text: of tags the words that have one."""
    if not isinstance(label, tuple):
        return str(label)
    if len(label) != len(example.texts) or len(example.texts) == 1:
        return ", ".join(label) or "none"
    spans = [" ".join(example.texts[start:end]) for start, end in sorted(entity_spans(label))]
    tagged = [word for word, tag in zip(example.texts, label, strict=True) if tag != "O"]
    return ", ".join(spans or tagged) or "none"
