"""The site of a benchmark: index, gains, ranks, cost, curves, systems, failures; tables as CSV,
Markdown, LaTeX.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medvl.benchmark.config import BenchmarkConfig
from medvl.benchmark.pages import curves, tables, tables as gains
from medvl.benchmark.pages.rows import Failure, Measurements, measure_systems
from medvl.benchmark.plan import Plan
from medvl.benchmark.settings import find_references
from medvl.benchmark.store import Store
from medvl.eval.html.page import Page, Section, write_page
from medvl.eval.html.tables import Cell, Table, as_text
from medvl.models import system

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
    "settings are those of "
    "their recipes. None was tuned for this benchmark, and the same number of steps suits some "
    "better than others."
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
    found = measure_systems(plan, store)
    main = [
        table
        for group, rows in found.groups().items()
        for table in (
            tables.survey_table(found, group, rows),
            *tables.family_tables(found, group, rows),
        )
    ]
    failures = [tables.failures_table(found)] if found.failures else []
    empty = tables.empty_columns_table(found)
    main += [] if empty is None else [empty]
    sections: dict[str, list[Section]] = {
        "Benchmark": [*main, *failures],
        "Gains": [*gains.gain_tables(found)],
        "Ranks": _ranks(found),
        "Cost": _cost(found),
        "Learning curves": _curves(found, store),
        "Systems": [
            _systems(found, store),
            *([tables.columns_table(found)] if found.columns else []),
        ],
        "Failures": [tables.failures_table(found), tables.refusals_table(found)],
    }
    shown = {title: parts for title, parts in sections.items() if parts}
    files = [(title, _FILES[title]) for title in shown]
    written = [_write(title, parts, found, store, files) for title, parts in shown.items()]
    return Site(pages=tuple(written), tables=(*main, *failures), failures=found.failures)


def print_site(site: Site) -> str:
    """Return the main tables as text, and the path of the first page."""
    texts = [as_text(table) for table in site.tables]
    return "\n".join([*texts, f"Wrote {site.pages[0]}"])


def _ranks(found: Measurements) -> list[Section]:
    sections: list[Section] = []
    for group, rows in found.groups().items():
        ranks = tables.ranks_of(found, rows)
        if ranks:
            sections.append(tables.ranks_table(found, group, rows, ranks))
            sections += tables.rank_tables(found, group, rows, ranks)
        unranked = tables.unranked_table(found, group, rows)
        sections += [] if unranked is None else [unranked]
    return sections or [_nothing("Ranks", "Ranks need two systems with results.")]


def _cost(found: Measurements) -> list[Section]:
    sections: list[Section] = []
    for group, rows in found.groups().items():
        sections.append(tables.cost_table(found, group, rows))
        plots = curves.cost_section(found, group, rows)
        sections += [] if plots is None else [plots]
    return sections or [_nothing("Cost", "No run is finished.")]


def _curves(found: Measurements, store: Store) -> list[Section]:
    losses = curves.loss_section(found, store)
    sections = [
        *curves.share_sections(found),
        *curves.label_sections(found),
        *([losses] if losses else []),
    ]
    return sections or [_nothing("Learning curves", "No run has records.")]


def _systems(found: Measurements, store: Store) -> Table:
    rows: list[list[Cell | str]] = []
    for run in found.plan.runs:
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


def _own_starts(found: Measurements) -> list[str]:
    """Return a phrase for each run that systems start from: "14 systems from the run of
    convirt".
    """
    referred = {
        (run.name, name) for run in found.plan.runs for name in find_references(run.settings)
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
    found: Measurements,
    store: Store,
    files: Sequence[tuple[str, str]],
) -> Path:
    config = found.plan.config
    states = [store.state(run) for run in found.plan.runs]
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
                "; ".join((", ".join(start.name for start in config.starts), *_own_starts(found))),
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
