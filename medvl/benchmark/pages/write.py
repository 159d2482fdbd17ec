"""The site of a benchmark: index, gains, ranks, cost, curves, systems, failures; tables as CSV,
Markdown, LaTeX.
"""

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medvl.benchmark.config import BenchmarkConfig
from medvl.benchmark.pages import tables, tables as gains
from medvl.benchmark.pages.rows import Failure, Measurements, SystemRow, measure_systems
from medvl.benchmark.pages.tables import FAILED, FAMILIES, group_name, measured_cell, titled
from medvl.benchmark.settings import Plan, Run, find_references
from medvl.benchmark.store import Store, read_records
from medvl.eval.html.page import (
    Page,
    Picture,
    Pictures,
    Section,
    Strip,
    plot_picture,
    slug,
    write_page,
)
from medvl.eval.html.plots import Plot, labelled_points, line_plot
from medvl.eval.html.tables import Cell, Table, as_text
from medvl.models import system

_BELOW_ZERO = "-below-zero", ", losses that fall below zero", "loss"


def loss_section(measurements: Measurements, store: Store) -> Pictures | None:
    """Return the training losses of the first seed, relative to the first record; None without
    records.

    Losses that fall below zero, such as bounds of mutual information, have a plot of their own, as
    they are.
    """
    strips = []
    for family, title in FAMILIES.items():
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for row in itertools.chain(*measurements.groups().values()):
            if row.family == family and row.weights == "trained":
                curve = _losses(store, row.runs[0])
                if curve is not None:
                    lines[
                        ", ".join(filter(None, [row.name, group_name(measurements, row.group)]))
                    ] = curve
        below = {name: curve for name, curve in lines.items() if min(curve[1]) < 0}
        ratios = {
            name: (x, [y / ys[0] for y in ys])
            for name, (x, ys) in lines.items()
            if name not in below
        }
        for drawn, suffix, which, unit in (
            (ratios, "", "", "loss / first loss"),
            (below, *_BELOW_ZERO),
        ):
            if drawn:
                plot = line_plot(f"losses-{family}{suffix}", drawn, "step", unit)
                picture = _picture(plot, "Training losses by step.")
                strips.append(Strip(title=f"{title.capitalize()}s{which}", pictures=[picture]))
    if not strips:
        return None
    caption = (
        "First seed. The losses of different systems are sums of different terms: compare "
        "only their shapes."
    )
    return Pictures(title="Training", strips=strips, caption=caption, kind="wide")


def share_sections(measurements: Measurements) -> list[Section]:
    """Return the metrics by share of the pretraining pairs; none of a benchmark with one share."""
    if len(measurements.plan.config.shares) < 2:
        return []
    sections: list[Section] = []
    for group in dict.fromkeys(row.group for row in measurements.rows):
        rows = [row for row in measurements.rows if row.group == group and row.weights == "trained"]
        name = group_name(measurements, group)
        strips = []
        lines: list[list[Cell | str]] = []
        for title in measurements.columns:
            of_system: dict[str, list[SystemRow]] = {}
            for row in sorted(
                (row for row in rows if title in row.metrics), key=lambda row: row.share
            ):
                of_system.setdefault(row.name, []).append(row)
            curves = {
                system: ([row.share for row in own], [row.metrics[title].value for row in own])
                for system, own in of_system.items()
            }
            if curves:
                plot = line_plot(
                    slug(f"share {name} {title}"), curves, "share of the pairs", title, log_x=True
                )
                strips.append(
                    Strip(title=title, pictures=[_picture(plot, f"{title} by share of the pairs.")])
                )
        shares = sorted(measurements.plan.config.shares)
        for row_name in dict.fromkeys(row.name for row in rows):
            for title in measurements.columns:
                task = measurements.tasks[title]
                own = {
                    row.share: measured_cell(row.metrics[title], len(row.runs))
                    if title in row.metrics
                    else FAILED
                    for row in rows
                    if row.name == row_name and (title in row.metrics or task in row.failed)
                }
                if own:
                    cells = [own.get(share, "–") for share in shares]
                    lines.append([f"{row_name}, {title}", *cells])
        heading = titled("Shares of the pairs", name)
        caption = (
            "All runs have the same number of steps: with few pairs they see each pair more often. "
            "Where there are fewer pairs than a batch, a batch has all of them."
        )
        sections.append(Pictures(title=heading, strips=strips, caption=caption, kind="wide"))
        columns = ["system and metric", *(f"{100 * share:g} %" for share in shares)]
        sections.append(Table(title=f"{heading}, numbers", columns=columns, rows=lines))
    return sections


def label_sections(measurements: Measurements) -> list[Section]:
    """Return the linear probes by share of the labels; none of a benchmark with one share."""
    probes = {name: titles for name, titles in _probes(measurements).items() if len(titles) > 1}
    sections: list[Section] = []
    for group, rows in measurements.groups().items():
        name = group_name(measurements, group)
        strips = []
        for probe, titles in probes.items():
            curves = {}
            for row in rows:
                own = {
                    share: row.metrics[title].value
                    for share, title in titles.items()
                    if title in row.metrics
                }
                if own:
                    curves[row.title] = (list(own), list(own.values()))
            if curves:
                plot = line_plot(
                    slug(f"labels {name} {probe}"), curves, "share of the labels", probe, log_x=True
                )
                strips.append(
                    Strip(
                        title=probe, pictures=[_picture(plot, f"{probe} by share of the labels.")]
                    )
                )
        if strips:
            sections.append(
                Pictures(title=titled("Shares of the labels", name), strips=strips, kind="wide")
            )
    return sections


def _probes(measurements: Measurements) -> dict[str, dict[float, str]]:
    """Return task, metric and target -> share of the labels -> title, of columns such as
    auroc@10%.
    """
    probes: dict[str, dict[float, str]] = {}
    for title, column in measurements.columns.items():
        metric, at, share = column.metric.partition("@")
        if at and share.endswith("%"):
            target = "" if column.targets[0].startswith("macro") else f", {column.targets[0]}"
            probe = f"{measurements.tasks[title]}, {metric.upper()}{target}"
            probes.setdefault(probe, {})[float(share.removesuffix("%")) / 100] = title
    return {name: dict(sorted(titles.items())) for name, titles in probes.items()}


def cost_section(
    measurements: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> Pictures | None:
    """Return quality beside training time for each column; None without costs."""
    name = group_name(measurements, group)
    strips = []
    for title in measurements.columns:
        points = {}
        for row in rows:
            minutes = [cost.train_seconds / 60 for cost in row.costs if cost.train_seconds]
            if row.weights == "trained" and title in row.metrics and minutes:
                points[row.name] = (statistics.mean(minutes), row.metrics[title].value)
        if len(points) > 1:
            plot = labelled_points(slug(f"cost {name} {title}"), points, "training, minutes", title)
            strips.append(
                Strip(title=title, pictures=[_picture(plot, f"{title} by minutes of training.")])
            )
    return (
        Pictures(title=titled("Quality by training time", name), strips=strips, kind="wide")
        if strips
        else None
    )


def _picture(plot: Plot, alternative: str) -> Picture:
    return plot_picture(plot, alternative=alternative)


def _losses(store: Store, run: Run) -> tuple[list[float], list[float]] | None:
    records = read_records(store.folder(run) / "run")
    points = [
        (record["step"], record["loss"])
        for record in records
        if record["kind"] == "train" and record["loss"]
    ]
    if not points:
        return None
    return [step for step, _ in points], [loss for _, loss in points]


_FILES = {
    "Benchmark": "index.html",
    "Gains": "gains.html",
    "Ranks": "ranks.html",
    "Cost": "cost.html",
    "Learning curves": "curves.html",
    "Systems": "systems.html",
    "Failures": "failures.html",
}
_LIMIT = (
    "All systems have the same data, steps and, where the file sets them, encoders; all other "
    "settings are those of their recipes. None was tuned for this benchmark, and the same number "
    "of steps suits some better than others."
)
_PHANTOM_LIMIT = (
    "Results on the phantom show that the software works and how systems differ on "
    "it, and say nothing about patients."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Pages that were written, and what they show."""

    pages: tuple[Path, ...]
    tables: tuple[Table, ...]
    """Main tables, for the terminal."""
    failures: tuple[Failure, ...]


def write_site(plan: Plan, store: Store) -> Site:
    """Write results.jsonl and the pages of a benchmark into its folder."""
    store.write_lines(plan.runs)
    measurements = measure_systems(plan, store)
    main = [
        table
        for group, rows in measurements.groups().items()
        for table in (
            tables.survey_table(measurements, group, rows),
            *tables.family_tables(measurements, group, rows),
        )
    ]
    failures = [tables.failures_table(measurements)] if measurements.failures else []
    empty = tables.empty_columns_table(measurements)
    main += [] if empty is None else [empty]
    sections: dict[str, list[Section]] = {
        "Benchmark": [*main, *failures],
        "Gains": [*gains.gain_tables(measurements)],
        "Ranks": _ranks(measurements),
        "Cost": _cost(measurements),
        "Learning curves": _curves(measurements, store),
        "Systems": [
            _systems(measurements, store),
            *([tables.columns_table(measurements)] if measurements.columns else []),
        ],
        "Failures": [tables.failures_table(measurements), tables.refusals_table(measurements)],
    }
    shown = {title: parts for title, parts in sections.items() if parts}
    files = [(title, _FILES[title]) for title in shown]
    written = [_write(title, parts, measurements, store, files) for title, parts in shown.items()]
    return Site(pages=tuple(written), tables=(*main, *failures), failures=measurements.failures)


def print_site(site: Site) -> str:
    """Return the main tables as text, and the path of the first page."""
    texts = [as_text(table) for table in site.tables]
    return "\n".join([*texts, f"Wrote {site.pages[0]}"])


def _ranks(measurements: Measurements) -> list[Section]:
    sections: list[Section] = []
    for group, rows in measurements.groups().items():
        ranks = tables.ranks_of(measurements, rows)
        if ranks:
            sections.append(tables.ranks_table(measurements, group, rows, ranks))
            sections += tables.rank_tables(measurements, group, rows, ranks)
        unranked = tables.unranked_table(measurements, group, rows)
        sections += [] if unranked is None else [unranked]
    return sections or [_nothing("Ranks", "Ranks need two systems with results.")]


def _cost(measurements: Measurements) -> list[Section]:
    sections: list[Section] = []
    for group, rows in measurements.groups().items():
        sections.append(tables.cost_table(measurements, group, rows))
        plots = cost_section(measurements, group, rows)
        sections += [] if plots is None else [plots]
    return sections or [_nothing("Cost", "No run is finished.")]


def _curves(measurements: Measurements, store: Store) -> list[Section]:
    losses = loss_section(measurements, store)
    sections = [
        *share_sections(measurements),
        *label_sections(measurements),
        *([losses] if losses else []),
    ]
    return sections or [_nothing("Learning curves", "No run has records.")]


def _systems(measurements: Measurements, store: Store) -> Table:
    rows: list[list[Cell | str]] = []
    for run in measurements.plan.runs:
        summary = (system(run.system).__doc__ or "").strip().partition("\n")[0]
        folder = f"runs/{run.key}"
        recipe = f"{Path(run.recipe).stem} {run.preset}"
        rows.append(
            [
                run.title,
                store.state(run),
                tables.FAMILIES[run.family],
                summary,
                recipe,
                ", ".join(run.tasks),
                folder,
            ]
        )
    return Table(
        title="Runs",
        columns=["run", "state", "family", "system", "recipe and preset", "tasks", "folder"],
        rows=rows,
        caption="run.json in the folder has all settings; the folder's name is their hash.",
    )


def _own_starts(measurements: Measurements) -> list[str]:
    """Return a phrase for each run that systems start from: "14 systems from the run of
    convirt".
    """
    referred = {
        (run.name, name) for run in measurements.plan.runs for name in find_references(run.settings)
    }
    counts = Counter(name for _, name in referred)
    return [
        f"{count} system{'s'[: count > 1]} from the run of {name}"
        for name, count in sorted(counts.items())
    ]


def _nothing(title: str, reason: str) -> Table:
    return Table(title=title, columns=["", ""], rows=[], caption=reason)


def _write(
    title: str,
    sections: Sequence[Section],
    measurements: Measurements,
    store: Store,
    files: Sequence[tuple[str, str]],
) -> Path:
    config = measurements.plan.config
    states = [store.state(run) for run in measurements.plan.runs]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in ("finished", "failed", "to do")
    )
    budget = config.budget
    length = "the recipes' own length" if budget.steps is None else f"{budget.steps} steps"
    batch = "their own batch" if budget.batch is None else f"batches of {budget.batch}"
    page = Page(
        title=title,
        subtitle=f"{config.name}. {config.description}",
        headlines=[],
        facts=[
            ("Runs", f"{len(states)}: {counts}"),
            ("Seeds", ", ".join(map(str, config.seeds))),
            ("Corpora", ", ".join(corpus.name for corpus in config.corpora)),
            (
                "Start weights",
                "; ".join(
                    (", ".join(start.name for start in config.starts), *_own_starts(measurements))
                ),
            ),
            ("Training", f"{length}, {batch}"),
            ("Intervals", f"95%, {config.evaluation.resamples:,} resamples of patients"),
        ],
        sections=list(sections),
        limits=(_LIMIT, *_phantom_limit(config)),
        pages=tuple(files),
    )
    return write_page(page, store.out / _FILES[title])


def _phantom_limit(config: BenchmarkConfig) -> tuple[str, ...]:
    commands = (line for corpus in config.corpora for step in corpus.make for line in step.run)
    return (_PHANTOM_LIMIT,) if any(line.startswith("phantom ") for line in commands) else ()
