"""Part of `compare_dual.py`: runs that compare ways of training one system, and their table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compare_runs import PAIRED, UNPAIRED, Preset, Run, make_run
from results import cell

from medvl.eval import read_results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """A row of the table."""

    title: str
    system: str
    name: str
    """Name of the run; that of a system is its run in the main table."""
    metric: tuple[str, str, str]
    """Evaluation, metric, target."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `Run`."""


_ACCURACY = ("macro_accuracy", "macro")
_AUROC = ("zero-shot", "auroc", "macro_competition")
_CHANGE = {"tasks": ("change", "change-without-prior")}
_ZERO_SHOT = {"tasks": ("zero-shot",)}
_RETRIEVAL = ("retrieval", "recall@10", "image_to_text")
_FEW: dict[str, Any] = {"paired_share": 0.01}
_EA = {"changes": {**_FEW, "adversarial_weight": 0.0}, "tasks": ("zero-shot", "retrieval")}
_EA_ADV = {"changes": _FEW, "tasks": ("zero-shot", "retrieval")}

EXTRAS = (
    Extra(
        title="BioViL-T with the prior image, macro accuracy of change",
        system="biovil_t",
        name="biovil_t",
        metric=("change", *_ACCURACY),
        fields=_CHANGE,
    ),
    Extra(
        title="the same model without the prior image",
        system="biovil_t",
        name="biovil_t",
        metric=("change-without-prior", *_ACCURACY),
        fields=_CHANGE,
    ),
    Extra(
        title="MedCLIP on a tenth of the pairs, and the rest unpaired, zero-shot AUROC",
        system="medclip",
        name="medclip-tenth",
        metric=_AUROC,
        fields={"train": (PAIRED, UNPAIRED), **_ZERO_SHOT},
    ),
    Extra(
        title="ConVIRT on the same tenth of the pairs, zero-shot AUROC",
        system="convirt",
        name="convirt-tenth",
        metric=_AUROC,
        fields={"train": (PAIRED,), **_ZERO_SHOT},
    ),
    *(
        Extra(
            title=f"UMRL with 1 % of the pairs, {way}, {title}", system="umrl", name=name, metric=metric, fields=fields
        )
        for title, metric in (("zero-shot AUROC", _AUROC), ("R@10 image to text", _RETRIEVAL))
        for way, name, fields in (("EA+Adv", "umrl-ea-adv", _EA_ADV), ("EA alone", "umrl-ea", _EA))
    ),
)


def extra_runs(presets: Mapping[str, Preset | None], seeds: Sequence[int]) -> list[Run]:
    """Return the runs of `EXTRAS` whose systems exist."""
    found = [(extra, presets.get(extra.system)) for extra in EXTRAS]
    return [
        make_run(extra.name, preset, seed, **extra.fields)
        for extra, preset in found
        if preset is not None
        for seed in seeds
    ]


def extras_table(runs: Sequence[Run], home: Path, failed: Mapping[str, str]) -> str:
    """Return the table of `EXTRAS`: a row for each, a column for each seed; a dash where there is no result."""
    seeds = sorted({run.seed for run in runs})
    lines = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} |", "|" + "---|" * (len(seeds) + 1)]
    for extra in EXTRAS:
        cells = [_cell(extra, run, home) for run in runs if run.name == extra.name]
        lines.append(f"| {extra.title} | {' | '.join(cells[: len(seeds)] or ['–'] * len(seeds))} |")
    missing = sorted({extra.system for extra in EXTRAS} - {run.config.system for run in runs})
    notes = [f"{name}: not in the registry." for name in missing] + [f"{name}: {why}." for name, why in failed.items()]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(extra: Extra, run: Run, home: Path) -> str:
    task, metric, target = extra.metric
    path = run.results(home, "trained", task) / "results.json"
    return cell(read_results(path), metric, target) if path.is_file() else "–"
