"""Output of a comparison of runs: HTML page, plain-text table and JSON. And one page of a start and
the model that was trained from it, evaluated on the same data.

For the latter, zero-shot classification, retrieval (beside the recall of the commonest texts) and a
linear probe of both checkpoints are compared (`medvl.eval.compare.compare`): paired differences
with intervals, in total and in the subgroups of the data. Zero-shot classification is repeated with
prompts in other words, and with retrieval on the shards of other sites: what training on one site
costs elsewhere.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.eval.compare.compare import Comparison, Run, compare, row_order
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.open import RunOptions, open_source
from medvl.eval.core.results import format_table, format_value, read_results, to_json
from medvl.eval.evaluation import Evaluation, run_evaluation
from medvl.eval.html import plots
from medvl.eval.html.page import (
    Page,
    Pictures,
    Section,
    Strip,
    dated,
    headline,
    plot_picture,
    slug,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.probing.evaluation import EncoderOptions, Probe
from medvl.eval.retrieval.evaluation import Retrieval
from medvl.eval.zero_shot_classification.evaluation import ZeroShot

_METRICS = {
    "auroc": "AUROC",
    "auroc_gap": "AUROC gap",
    "brier": "Brier score",
    "ece": "calibration error",
    "f1": "F1",
    "mcc": "MCC",
    "cnr": "CNR",
    "mrr": "MRR",
    "ndcg": "NDCG",
}
_PAIRED = "Differences are paired; an arrow marks those whose interval excludes 0."
_TARGETS = {
    "macro": "mean over classes",
    "macro_competition": "mean of the five competition findings",
    "overall": "all items",
    "one class": "images of one class",
}
_LIMITS = (
    "Differences are the named run minus the first, on the same resamples of the same items, "
    "with 95% intervals. An "
    "arrow marks intervals that exclude 0. With many rows, some intervals exclude 0 by chance.",
    "Paired intervals cover the sampling of test patients. They do not cover the variation of "
    "training: another seed gives other weights.",
)


def write_comparison(
    comparisons: Sequence[Comparison],
    folder: str | Path,
    *,
    title: str = "Comparison of runs",
    date: str | None = None,
) -> list[Path]:
    """Write `comparison.json` and `index.html`, a page with this title, into a folder, created if
    missing, and return their paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = [comparison.as_json() for comparison in comparisons]
    written = write_atomic(
        folder / "comparison.json", json.dumps(to_json(content), indent=2, allow_nan=False) + "\n"
    )
    names = list(dict.fromkeys(run.name for comparison in comparisons for run in comparison.runs))
    facts = [("Compared with", comparisons[0].runs[0].name)] if len(names) > 1 else []
    facts += _run_facts(comparisons)
    for comparison in comparisons:
        facts += [(f"{_name(comparison)} differs", note) for note in comparison.notes]
    targets = {
        row.target for comparison in comparisons for row in _rows(comparison) if row_order(row) == 1
    }
    findings = [name for comparison in comparisons for name in comparison.curves] or sorted(targets)
    page = Page(
        title=title,
        subtitle=", ".join(names),
        headlines=[box for comparison in comparisons for box in _headlines(comparison)],
        facts=dated(date, facts),
        sections=[
            *(table for comparison in comparisons for table in _summary(comparison)),
            *(
                section
                for comparison in comparisons
                for section in _sections(
                    comparison, f"{_name(comparison)}: " if len(comparisons) > 1 else ""
                )
            ),
        ],
        limits=_LIMITS,
        findings=list(dict.fromkeys(findings)),
    )
    return [written, write_page(page, folder / "index.html")]


def _run_facts(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """Yield each run with its protocols and the hash of its weights, once for the same weights.

    Titles stand in the headlines.
    """
    protocols: dict[tuple[str, str], list[str]] = {}
    for comparison in comparisons:
        for run in comparison.runs:
            weights = run.results.inputs.get("checkpoint")
            checkpoint = f"checkpoint sha256 {weights[:12]}" if weights else ""
            known = protocols.setdefault((run.name, checkpoint), [])
            known += [] if comparison.title else [comparison.protocol]
    for (name, checkpoint), known in protocols.items():
        yield name, ", ".join([*known, *([checkpoint] if checkpoint else [])])


def format_comparison(comparison: Comparison) -> str:
    """Return every row with the values of all runs and their differences from the first, and notes,
    as text.

    Means come first, then classes, then subgroups, each in a table of their own: in the columns of
    a narrow screen, the differences of the means are near their values.
    """
    by_kind: dict[int, list[MetricRow]] = {0: [], 1: [], 2: []}
    for known in _rows(comparison):
        for number, run in enumerate(comparison.runs):
            rows = by_kind[row_order(known)]
            rows.append(_renamed(comparison.value(number, known.name), known.name, run.name))
            if number and known.name in comparison.differences[number - 1]:
                rows.append(
                    _renamed(
                        comparison.differences[number - 1][known.name],
                        known.name,
                        f"{run.name} difference",
                    )
                )
    return "\n\n".join(
        [
            comparison.title or comparison.protocol,
            *(format_table(rows) for rows in by_kind.values() if rows),
            *comparison.notes,
        ]
    )


def _renamed(row: MetricRow | None, name: str, column: str) -> MetricRow:
    """Return a row whose metric is the name of a run, for a table with one column per run."""
    blank = MetricRow(metric=column, target=name)
    return (
        blank
        if row is None
        else dataclasses.replace(row, metric=column, target=name, subgroup="", n_positive=None)
    )


def _rows(comparison: Comparison) -> list[MetricRow]:
    """Return one row of each name, of the first run that has it, in the order of
    `comparison.rows`.
    """
    known = {row.name: row for run in reversed(comparison.runs) for row in run.results.rows}
    return [known[name] for name in comparison.rows]


def _main_rows(comparison: Comparison) -> list[MetricRow]:
    """Return the rows of the summary: means over classes, or all rows of a protocol without
    means.
    """
    rows = [row for row in _rows(comparison) if not row.subgroup]
    return [row for row in rows if row_order(row) == 0] or rows


def _headlines(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return a box for each run, or one with the change if the comparison has a title and two
    runs.
    """
    rows = _main_rows(comparison)
    if not rows:
        return []
    if comparison.title and len(comparison.runs) == 2:
        return [_change(comparison, rows)]
    row = rows[0]
    label = f"{comparison.title}: {_label(row)}" if comparison.title else _label(row)
    return [
        headline(f"{label}, {run.name}", _value(comparison, n, row))
        for n, run in enumerate(comparison.runs)
    ]


def _change(comparison: Comparison, rows: Sequence[MetricRow]) -> tuple[str, str, str]:
    """Return the box of the first metric: the value of the second run, and beside it that of the
    first and their difference.
    """
    paired = comparison.differences[0]
    metric = rows[0].metric.partition("@")[0]  # a probe is paired at a share of the labels
    same = [row for row in rows if row.metric.partition("@")[0] == metric]
    row = next((row for row in same if row.name in paired), rows[0])
    label, after, _ = headline(f"{comparison.title}: {_label(row)}", _value(comparison, 1, row))
    _, before, _ = headline("", _value(comparison, 0, row))
    difference = _difference(paired.get(row.name))
    parts = [f"{comparison.runs[0].name} {before},", difference.text, difference.small]
    return label, after, " ".join(part for part in parts if part)


def _value(comparison: Comparison, run: int, row: MetricRow) -> MetricRow:
    return comparison.value(run, row.name) or MetricRow(metric=row.metric, target="")


def _label(row: MetricRow) -> str:
    target = _TARGETS.get(row.target, row.target.replace("_", " "))
    return f"{_metric(row.metric)}, {target}"


def _sections(comparison: Comparison, prefix: str) -> Iterator[Section]:
    """Yield the plots, then a table for each metric: means and classes, subgroups, and baselines
    and variants.
    """
    rows = _rows(comparison)
    whole = [row for row in rows if not row.subgroup]
    parts = [row for row in rows if row.subgroup]
    yield from _difference_plots(comparison, whole, parts, prefix)
    if comparison.curves:
        yield _roc_curves(comparison, prefix)
    for metric in dict.fromkeys(row.metric for row in rows):
        for group, title in (
            (whole, ""),
            ([row for row in parts if _of_items(row)], " in subgroups"),
            ([row for row in parts if not _of_items(row)], ", baselines and variants"),
        ):
            of_metric = [row for row in group if row.metric == metric]
            if of_metric:
                yield _table(comparison, of_metric, f"{prefix}{_metric(metric)}{title}", "")


def _of_items(row: MetricRow) -> bool:
    """Return whether a row is of some of the items, such as "sex: F", and not of a baseline or
    of other inputs.
    """
    return ": " in row.subgroup and not row.subgroup.startswith("baseline: ")


def _summary(comparison: Comparison) -> Iterator[Table]:
    """Yield the table of the metrics that are fractions, and one for each other metric, which
    has another axis.
    """
    rows = _main_rows(comparison)
    named = "Means over classes" if row_order(rows[0]) == 0 else "All metrics"
    caption = (
        f"{named}, with 95% intervals. The bars of the runs have one axis, those of the "
        f"differences another. "
    )
    scales: dict[str, list[MetricRow]] = {}
    for row in rows:
        scales.setdefault("" if _is_fraction(comparison, row.metric) else row.metric, []).append(
            row
        )
    for metric, of_scale in scales.items():
        part = f", {_metric(metric)}" if metric and len(scales) > 1 else ""
        yield _table(
            comparison,
            of_scale,
            f"Summary: {_name(comparison).lower()}{part}",
            caption,
            full_names=True,
        )


def _is_fraction(comparison: Comparison, metric: str) -> bool:
    """Return whether all values of a metric, with their intervals, are between -1 and 1."""
    known = [
        row
        for run in comparison.runs
        for row in run.results.rows
        if row.metric == metric and not row.subgroup
    ]
    numbers = [
        number
        for row in known
        for number in (row.low, row.value, row.high)
        if not math.isnan(number)
    ]
    return all(-1 <= number <= 1 for number in numbers)


def _table(
    comparison: Comparison,
    rows: Sequence[MetricRow],
    title: str,
    caption: str,
    *,
    full_names: bool = False,
) -> Table:
    runs = range(len(comparison.runs))
    parts = any(row.subgroup for row in rows)
    paired = [n for n in runs[1:] if any(row.name in comparison.differences[n - 1] for row in rows)]
    lines: list[Sequence[Cell | str]] = []
    for row in rows:
        values = [metric_cell(comparison.value(number, row.name), bar=True) for number in runs]
        differences = [
            _difference(comparison.differences[number - 1].get(row.name)) for number in paired
        ]
        name = (
            _label(row)
            if full_names
            else _TARGETS.get(row.target, row.target).capitalize()
            if row_order(row) == 0
            else row.target
        )
        lines.append(
            [name, *([row.subgroup] if parts else []), *values, *differences, f"{row.n:,}"]
        )
    first = comparison.runs[0].name
    shift = int(parts)
    return Table(
        title=title[:1].upper() + title[1:],
        columns=[
            "",
            *(["Subgroup"] if parts else []),
            *(run.name for run in comparison.runs),
            *(f"{comparison.runs[number].name} minus {first}" for number in paired),
            "n",
        ],
        rows=lines,
        strong_rows=0 if full_names else sum(row_order(row) == 0 for row in rows),
        one_axis=frozenset(number + shift for number in runs),
        caption=(caption or "With 95% intervals. ") + (_PAIRED if paired else ""),
    )


def _difference_plots(
    comparison: Comparison, whole: Sequence[MetricRow], parts: Sequence[MetricRow], prefix: str
) -> Iterator[Pictures]:
    """Yield the paired differences of the first metric by class, and of its first mean by
    subgroup.
    """
    metric, target = (whole[0].metric, whole[0].target) if whole else ("", "")
    for title, rows in (
        ("by class", [row for row in whole if row.metric == metric]),
        (
            "by subgroup",
            [
                row
                for row in parts
                if (row.metric, row.target) == (metric, target) and _of_items(row)
            ],
        ),
    ):
        known = [
            row for row in rows if any(row.name in of_run for of_run in comparison.differences)
        ]
        if known:
            yield _difference_plot(comparison, known, title, prefix)


def _difference_plot(
    comparison: Comparison, rows: Sequence[MetricRow], title: str, prefix: str
) -> Pictures:
    first = comparison.runs[0].name
    others = comparison.runs[1:]
    metric = _metric(rows[0].metric)
    systems = []
    summaries = []
    for number, run in enumerate(others):
        metric_rows = [
            comparison.differences[number].get(row.name) or MetricRow(metric=metric, target="")
            for row in rows
        ]
        value_K, low_K, high_K = np.array([(row.value, row.low, row.high) for row in metric_rows]).T
        color = plots.LINE_COLORS[number % len(plots.LINE_COLORS)]
        systems.append(
            plots.Series(name=run.name, value_K=value_K, low_K=low_K, high_K=high_K, color=color)
        )
        higher = int((low_K > 0).sum())
        lower = int((high_K < 0).sum())
        summaries.append(
            f"{run.name} is higher in {higher} and lower in {lower} of {len(rows)} rows, by "
            f"intervals without 0"
        )
    names = [row.subgroup or _TARGETS.get(row.target, row.target) for row in rows]
    name = slug(f"differences {comparison.protocol} {title}")
    plot = plots.interval_plot(
        name, names, systems, axis=f"{metric}: difference from {first}", line=0.0
    )
    alternative = (
        f"Paired differences in {metric} from {first}, {title}, with 95% intervals: "
        f"{'; '.join(summaries)}."
    )
    return Pictures(
        title=f"{prefix}Differences {title}",
        kind="wide",
        strips=[
            Strip(title="", pictures=[plot_picture(plot, alternative=alternative, lines=summaries)])
        ],
        caption=f"Each run minus {first}, on the same resamples: right of the line, the run has "
        f"the higher value.",
    )


def _roc_curves(comparison: Comparison, prefix: str) -> Pictures:
    strips = []
    for name, curves in comparison.curves.items():
        of_runs = enumerate(run.name for run in comparison.runs)
        rows = {run: comparison.value(number, f"auroc/{name}") for number, run in of_runs}
        values = {run: format_value(row).partition(" ")[0] for run, row in rows.items()}
        labelled = {f"{run}  {values[run]}": curve for run, curve in curves.items()}
        aurocs = ", ".join(f"{run} {values[run]}" for run in curves)
        plot = plots.roc_overlay(f"roc-{comparison.protocol}-{slug(name)}", labelled, beside=False)
        picture = plot_picture(
            plot,
            alternative=f"ROC curves of the runs for {name}; AUROC: {aurocs}.",
            lines=[f"AUROC: {aurocs}"],
        )
        strips.append(Strip(title=name, pictures=[picture]))
    return Pictures(
        title=f"{prefix}ROC curves",
        kind="grid",
        strips=strips,
        caption="The runs in one plot for each class. The diagonal is chance.",
    )


def _metric(name: str) -> str:
    base, at, share = name.partition("@")
    return f"{_METRICS.get(base, base.replace('_', ' '))}{at}{share}"


def _name(comparison: Comparison) -> str:
    return comparison.title or comparison.protocol.replace("_", " ").capitalize()


def _difference(row: MetricRow | None) -> Cell:
    if row is None or math.isnan(row.value):
        return Cell(text="–")
    number, _, interval = format_value(row).partition(" ")
    arrow = "▲ " if row.low > 0 else "▼ " if row.high < 0 else ""
    return Cell(
        text=f"{arrow}{'+' if row.value >= 0 else ''}{number}",
        small=interval,
        interval=(row.low, row.value, row.high),
        bar=bool(interval),
        reference=0.0,
    )


_STUDIES = 100
"""Studies that are read to find out whether shards have texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Checkpoints, and the data on which they are compared.

    Attributes:
        start: checkpoint that the training began with; a dual-encoder, as `trained`.
        trained: run or checkpoint after the training.
        data: shards of patients of neither training.
        prompts: prompt set of the labels, as of `medvl eval zero-shot`.
        wordings: prompt sets of the same labels in other words.
        sites: shards of other sites.
        train, valid: shards on which the probe is fitted, and chosen; without them no probe.
    """

    start: Path
    trained: Path
    data: Path
    prompts: str | None = None
    wordings: Sequence[str] = ()
    sites: Sequence[Path] = ()
    train: Path | None = None
    valid: Path | None = None

    def __post_init__(self) -> None:
        if (self.train is None) != (self.valid is None):
            message = "expected train and valid for a probe, got one of them; give both or none"
            raise ConfigError(message, "missing", field="valid" if self.train else "train")

    def evaluations(self) -> Iterator[tuple[str, Callable[[Path], Evaluation]]]:
        """Yield the title of each evaluation, and a function that returns it for a checkpoint.

        Shards without labels have no zero-shot classification and no probe, those without texts no
        retrieval.
        """
        several = len({path.name for path in (self.data, *self.sites)}) <= len(self.sites)
        for data in (self.data, *self.sites):
            place = "" if data == self.data else f" on {data if several else data.name}"
            source = open_source(str(data))
            if source.label_names:
                yield f"Zero-shot classification{place}", self._zero_shot(data, self.prompts)
            for words in self.wordings if source.label_names and not place else ():
                title = f"Zero-shot classification with {Path(words).stem}"
                yield title, self._zero_shot(data, words)
            if any(itertools.islice(source.texts_by_study(), _STUDIES)):
                yield f"Retrieval{place}", self._retrieval(data)
            if self.train and self.valid and source.label_names and not place:
                yield "Linear probe", self._probe(self.train, self.valid)

    def _zero_shot(self, data: Path, prompts: str | None) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: ZeroShot(checkpoint=(checkpoint,), data=data, prompts=prompts)

    def _retrieval(self, data: Path) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: Retrieval(checkpoint=checkpoint, data=data)

    def _probe(self, train: Path, valid: Path) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: Probe(
            train=train,
            valid=valid,
            test=self.data,
            fractions=(1.0,),
            image=EncoderOptions(checkpoint=checkpoint),
        )

    def compare(self, folder: Path, options: RunOptions) -> list[Comparison]:
        """Evaluate both checkpoints, and return a comparison for each evaluation.

        Args:
            folder: gets a folder for each evaluation and checkpoint.
            options: batches, device, resamples and `replace`.

        Raises as the evaluations, and ConfigError for data without labels and texts.
        """
        comparisons = []
        for title, make in self.evaluations():
            runs = []
            for name, checkpoint in (("start", self.start), ("trained", self.trained)):
                out = folder / "evaluations" / slug(title) / name
                run_evaluation(make(checkpoint), dataclasses.replace(options, out=out))
                runs.append(Run(name, out, read_results(out)))
            comparison = compare(runs, resamples=options.resamples)
            comparisons.append(dataclasses.replace(comparison, title=title))
        if not comparisons:
            message = f"expected labels or texts, got shards without both in {self.data}"
            raise ConfigError(f"{message}; give other shards", "empty", field="data")
        return comparisons
