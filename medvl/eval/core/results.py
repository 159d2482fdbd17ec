"""What an evaluation leaves behind: `results.json`, `predictions.jsonl` and a table in plain text.

`results.json` has all that is needed to know what a number is: the protocol and its version, the metric rows with
their intervals, the settings, the hashes of everything that went in, and package versions. Values that are not
defined are null. Nothing in it depends on the clock, so the same evaluation writes the same bytes.
"""

import dataclasses
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import medvl
from medvl.common.files import sha256, write_atomic
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricRow

RESULTS_VERSION = 1
_PACKAGES = ("numpy", "open_clip_torch", "timm", "torch", "transformers")


def package_versions() -> dict[str, str]:
    """Of medvl, Python and what decides a model's output."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"medvl": medvl.__version__, "python": platform.python_version(), **installed}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One run of an evaluator. Everything but the rows is JSON as it stands."""

    protocol: str
    protocol_version: int
    rows: tuple[MetricRow, ...]
    config: Mapping[str, Any]
    """The settings that decide the numbers."""
    inputs: Mapping[str, str | None]
    """Hash of each thing that went in: checkpoint, manifest, prompts, ... None where it has none."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Counts of what was judged and what was left out, thresholds, ..."""
    packages: Mapping[str, str] = dataclasses.field(default_factory=package_versions)

    def row(self, metric: str, target: str, subgroup: str = "") -> MetricRow:
        """The row of this name. Raises `EvaluationError` where there is none."""
        for row in self.rows:
            if (row.metric, row.target, row.subgroup) == (metric, target, subgroup):
                return row
        wanted = MetricRow(metric=metric, target=target, subgroup=subgroup).name
        raise EvaluationError(f"no row {wanted!r} in the results of {self.protocol}")


def write_results(
    results: Results, folder: str | Path, predictions: Iterable[Mapping[str, Any]] | None = None
) -> list[Path]:
    """Write `results.json`, and `predictions.jsonl` where predictions are given; the paths written.

    Both appear whole or not at all (a temporary file in the same folder, then a rename), the results last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if predictions is not None:
        lines = "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in predictions)
        paths.append(write_atomic(folder / "predictions.jsonl", lines))
    rows = [{"name": row.name, **dataclasses.asdict(row)} for row in results.rows]
    data = {
        "results_version": RESULTS_VERSION,
        "protocol": {"name": results.protocol, "version": results.protocol_version},
        "metrics": rows,
        **{field: getattr(results, field) for field in ("config", "inputs", "details", "packages")},
    }
    text = json.dumps(plain(data), indent=2, allow_nan=False) + "\n"
    paths.append(write_atomic(folder / "results.json", text))
    return paths


def plain(value: Any) -> Any:
    """A value as JSON has it: NaN is null, mappings and sequences are objects and lists, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_results(path: str | Path) -> Results:
    """Results from `results.json`, or from the folder that holds it. Raises `EvaluationError` that names the file."""
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    if not path.is_file():
        raise EvaluationError(f"{path} is not there: name a results.json or the folder that an evaluation wrote")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["results_version"]
        if version != RESULTS_VERSION:
            raise EvaluationError(f"{path} has format version {version}, this medvl reads version {RESULTS_VERSION}")
        return Results(
            protocol=data["protocol"]["name"],
            protocol_version=data["protocol"]["version"],
            rows=tuple(_read_row(row) for row in data["metrics"]),
            **{field: data[field] for field in ("config", "inputs", "details", "packages")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path} is not a results file of medvl ({type(error).__name__}: {error})") from error


def _read_row(row: dict[str, Any]) -> MetricRow:
    row = {key: value for key, value in row.items() if key != "name"}
    numbers = {key: math.nan if row[key] is None else float(row[key]) for key in ("value", "low", "high")}
    return MetricRow(**{**row, **numbers})


def checkpoint_sha256(checkpoint: str | Path) -> str:
    """Hash of a checkpoint's weights: of `model.safetensors` in a checkpoint directory, or of the file itself.

    Raises `EvaluationError` when it is not there.
    """
    path = Path(checkpoint)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise EvaluationError(f"{path} is not there: name a checkpoint directory that holds model.safetensors")
    return sha256(path)


def format_value(row: MetricRow | None) -> str:
    """ "0.873 [0.812, 0.921]", without brackets where there is no interval, "-" where there is no value."""
    if row is None or math.isnan(row.value):
        return "-"
    digits = 1 if abs(row.value) >= 10 else 3
    interval = "" if math.isnan(row.low) else f" [{row.low:.{digits}f}, {row.high:.{digits}f}]"
    return f"{row.value:.{digits}f}{interval}"


def format_table(rows: Sequence[MetricRow], width: int = 120) -> str:
    """Rows as aligned plain text: a line a target (and subgroup), a column a metric.

    Metrics that do not fit into `width` characters go into further tables beneath.
    """
    lines: dict[tuple[str, str], dict[str, MetricRow]] = {}
    for row in rows:
        lines.setdefault((row.target, row.subgroup), {})[row.metric] = row
    names = [f"{target} ({subgroup})" if subgroup else target for target, subgroup in lines]
    first = [next(iter(by_metric.values())) for by_metric in lines.values()]
    leading = [
        _aligned(["", *names], left=True),
        _aligned(["n", *(str(row.n) for row in first)]),
        _aligned(["positive", *("" if row.n_positive is None else str(row.n_positive) for row in first)]),
    ]
    if all(row.n_positive is None for row in first):
        leading.pop()
    tables = [list(leading)]
    for metric in dict.fromkeys(row.metric for row in rows):
        cells = [format_value(by_metric.get(metric)) for by_metric in lines.values()]
        column = _aligned([metric.replace("_", " "), *cells])
        taken = sum(len(other[0]) + 2 for other in tables[-1]) + len(column[0])
        if taken > width and len(tables[-1]) > len(leading):
            tables.append(list(leading))
        tables[-1].append(column)
    return "\n\n".join(_joined(table) for table in tables)


def _aligned(cells: Sequence[str], *, left: bool = False) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]


def _joined(columns: Sequence[Sequence[str]]) -> str:
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
