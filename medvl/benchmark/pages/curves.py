"""Plots of a benchmark: losses of the trainings, metrics by share of pairs and labels, and
quality beside cost.
"""

import itertools
import statistics
from collections.abc import Sequence

from medvl.benchmark.pages.rows import Measurements, SystemRow
from medvl.benchmark.pages.tables import FAILED, FAMILIES, group_name, measured_cell, titled
from medvl.benchmark.settings import Run
from medvl.benchmark.store import Store, read_records
from medvl.eval.html.page import Picture, Pictures, Section, Strip, plot_picture, slug
from medvl.eval.html.plots import Plot, labelled_points, line_plot
from medvl.eval.html.tables import Cell, Table

_BELOW_ZERO = "-below-zero", ", losses that fall below zero", "loss"


def loss_section(found: Measurements, store: Store) -> Pictures | None:
    """Return the training losses of the first seed, relative to the first record; None without
    records.

    Losses that fall below zero, such as bounds of mutual information, have a plot of their own, as
    they are.
    """
    strips = []
    for family, title in FAMILIES.items():
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for row in itertools.chain(*found.groups().values()):
            if row.family == family and row.weights == "trained":
                curve = _losses(store, row.runs[0])
                if curve is not None:
                    lines[", ".join(filter(None, [row.name, group_name(found, row.group)]))] = curve
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


def share_sections(found: Measurements) -> list[Section]:
    """Return the metrics by share of the pretraining pairs; none of a benchmark with one share."""
    if len(found.plan.config.shares) < 2:
        return []
    sections: list[Section] = []
    for group in dict.fromkeys(row.group for row in found.rows):
        rows = [row for row in found.rows if row.group == group and row.weights == "trained"]
        name = group_name(found, group)
        strips = []
        lines: list[list[Cell | str]] = []
        for title in found.columns:
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
        shares = sorted(found.plan.config.shares)
        for system in dict.fromkeys(row.name for row in rows):
            for title in found.columns:
                task = found.tasks[title]
                own = {
                    row.share: measured_cell(row.metrics[title], len(row.runs))
                    if title in row.metrics
                    else FAILED
                    for row in rows
                    if row.name == system and (title in row.metrics or task in row.failed)
                }
                if own:
                    cells = [own.get(share, "–") for share in shares]
                    lines.append([f"{system}, {title}", *cells])
        heading = titled("Shares of the pairs", name)
        caption = (
            "All runs have the same number of steps: with few pairs they see each pair more "
            "often. Where there are "
            "fewer pairs than a batch, a batch has all of them."
        )
        sections.append(Pictures(title=heading, strips=strips, caption=caption, kind="wide"))
        columns = ["system and metric", *(f"{100 * share:g} %" for share in shares)]
        sections.append(Table(title=f"{heading}, numbers", columns=columns, rows=lines))
    return sections


def label_sections(found: Measurements) -> list[Section]:
    """Return the linear probes by share of the labels; none of a benchmark with one share."""
    probes = {name: titles for name, titles in _probes(found).items() if len(titles) > 1}
    sections: list[Section] = []
    for group, rows in found.groups().items():
        name = group_name(found, group)
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


def _probes(found: Measurements) -> dict[str, dict[float, str]]:
    """Return task, metric and target -> share of the labels -> title, of columns such as
    auroc@10%.
    """
    probes: dict[str, dict[float, str]] = {}
    for title, column in found.columns.items():
        metric, at, share = column.metric.partition("@")
        if at and share.endswith("%"):
            target = "" if column.targets[0].startswith("macro") else f", {column.targets[0]}"
            probe = f"{found.tasks[title]}, {metric.upper()}{target}"
            probes.setdefault(probe, {})[float(share.removesuffix("%")) / 100] = title
    return {name: dict(sorted(titles.items())) for name, titles in probes.items()}


def cost_section(
    found: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> Pictures | None:
    """Return quality beside training time for each column; None without costs."""
    name = group_name(found, group)
    strips = []
    for title in found.columns:
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
