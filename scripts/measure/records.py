"""Records of measured lines in a file, and the Markdown tables made of them."""

import dataclasses
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from measure.line import Line, Report, Row, TableRow
from measure.profiling import KINDS
from medvl.common.files import write_atomic  # internal: a record is complete or absent

ROOT = Path(__file__).parents[2]
_DASH = "–"


@dataclasses.dataclass(kw_only=True)
class Record:
    """Result of one line."""

    line: str
    context: dict[str, Any]
    """Device, versions, commit, date, and whether sizes were tiny."""
    seconds: float
    report: Report | None = None
    error: str | None = None
    """Error that ended the line; a later call measures it again."""
    unavailable: str | None = None
    """Reason why this machine cannot measure the line."""


def context_of(device: torch.device, ceiling: float, dry_run: bool) -> dict[str, Any]:
    """Return the facts about a call that its figures depend on."""
    import torchvision
    import transformers

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "ceiling_tflops": ceiling,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "dry_run": dry_run,
    }


def _commit() -> str:
    """Return the short hash of the commit; "unknown" in a copy without a history, or where git
    is not installed.
    """
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def write_records(path: Path, records: Mapping[str, Record]) -> None:
    """Write the records by line, all of them or nothing."""
    values = {name: dataclasses.asdict(record) for name, record in records.items()}
    write_atomic(path, json.dumps(values, indent=1) + "\n")


def read_records(path: Path, dry_run: bool) -> dict[str, Record]:
    """Return the records of a file by line; none without the file. Raises ValueError where tiny
    and full sizes would be mixed.
    """
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    records = {}
    for name, values in stored.items():
        if values["context"]["dry_run"] != dry_run:
            kind = "a dry run" if values["context"]["dry_run"] else "a measurement"
            raise ValueError(f"{path} is of {kind}; give another --out")
        if (report := values.pop("report")) is not None:
            values["report"] = Report(**{**report, "rows": [Row(**row) for row in report["rows"]]})
        records[name] = Record(**values)
    return records


def cells_of(row: TableRow, report: Report) -> tuple[str, str] | None:
    """Return the cells of peer and medvl; None where a figure of them was not measured."""
    values = {**report.figures, "rows": report.rows}
    try:
        return row.peer.format_map(values), row.ours.format_map(values)
    except (KeyError, IndexError, TypeError):  # a contender failed, so that its figure is missing
        return None


def summary(lines: Sequence[Line], records: Mapping[str, Record], notes: Mapping[str, str]) -> str:
    """Return the table of lines: target, peer, medvl and command.

    `notes` has the reasons for lines without a record.
    """
    rows = []
    for line in lines:
        record, command = records.get(line.name), f"`{line.command}`"
        if record is None or record.report is None:
            why = _reason(record, notes.get(line.name))
            rows.append([f"`{line.name}`: {line.measures}", "", "", why, command])
            continue
        for row in line.rows:
            cells = cells_of(row, record.report) or ("", "not measured: see the contenders")
            rows.append([row.title, row.target, *cells, command])
        if not line.rows:
            figures = (f"{name}: {value:,.4g}" for name, value in record.report.figures.items())
            rows.append([f"`{line.name}`", "", "", "; ".join(figures) or _DASH, command])
    return _table(["Line", "Target", "Peer", "medvl", "Command"], rows)


def details(lines: Sequence[Line], records: Mapping[str, Record]) -> str:
    """Return what the lines measured besides: figures, contenders and profiles."""
    parts = [
        f"`{line.name}`: "
        + "; ".join(
            [*(f"{value:,.4g} {name}" for name, value in report.figures.items()), *report.notes]
        )
        for line in lines
        if line.name in records and (report := records[line.name].report) is not None
    ]
    parts += [rows_table(lines, records), profiles_table(lines, records)]
    return "\n\n".join(part for part in parts if part)


def rows_table(lines: Sequence[Line], records: Mapping[str, Record]) -> str:
    """Return the table of all contenders."""
    rows = []
    for line, row in _rows(lines, records):
        rate = _DASH if row.rate is None else f"{row.rate:,.4g} {row.unit}"
        spread = _DASH if row.ms is None else f"{row.ms:.4g} [{row.ms_p10:.4g}, {row.ms_p90:.4g}]"
        mfu = _DASH if row.mfu is None else f"{row.mfu:.1%}"
        numbers = [_number(value) for value in (row.host_ms, row.gb, row.tflops)]
        cells = [
            f"`{line.name}`",
            row.contender,
            rate,
            spread,
            *numbers,
            mfu,
            _number(row.first_step_seconds),
        ]
        rows.append(cells if row.error is None else [*cells[:2], row.error, *[_DASH] * 6])
    titles = [
        "line",
        "contender",
        "rate",
        "ms of a step, median [10 %, 90 %]",
        "ms by the host's clock",
    ]
    return (
        _table([*titles, "peak memory, GB", "TFLOP/s", "MFU", "first step, s"], rows)
        if rows
        else ""
    )


def profiles_table(lines: Sequence[Line], records: Mapping[str, Record]) -> str:
    """Return the table of profiles: the share of each kind of kernel, the idle share, and the
    longest kernels.
    """
    rows = []
    for line, row in _rows(lines, records):
        if row.profile is None or not row.profile["kernels"]:
            continue
        shares = [f"{row.profile['shares'][kind]:.0%}" for kind in KINDS]
        longest = "; ".join(
            f"{each['name'][:60]} {each['share']:.0%}" for each in row.profile["kernels"][:3]
        )
        rows.append(
            [
                f"`{line.name}`",
                row.contender,
                *shares,
                f"{row.profile['idle']:.0%}",
                longest.replace("|", "/"),
            ]
        )
    return _table(["line", "contender", *KINDS, "idle", "longest kernels"], rows) if rows else ""


def _rows(lines: Sequence[Line], records: Mapping[str, Record]) -> list[tuple[Line, Row]]:
    reports = [(line, records[line.name].report) for line in lines if line.name in records]
    return [(line, row) for line, report in reports if report is not None for row in report.rows]


def _reason(record: Record | None, note: str | None) -> str:
    if record is None:
        return note or "not measured"
    return (
        f"not available: {record.unavailable}" if record.unavailable else f"failed: {record.error}"
    )


def _number(value: float | None) -> str:
    return _DASH if value is None else f"{value:.4g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *rows)
    )


def provenance(contexts: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence for each set of device, versions and commit."""
    sentences = []
    for each in contexts:
        sizes = " Tiny sizes: these figures say nothing about speed." if each["dry_run"] else ""
        versions = (
            f"torch {each['torch']}, cuDNN {each['cudnn']}, torchvision {each['torchvision']}"
        )
        sentences.append(
            f"Commit {each['commit']}, {each['date']}, {each['device']}, bf16 matrix product "
            f"{each['ceiling_tflops']:.4g} TFLOP/s; {versions}, transformers "
            f"{each['transformers']}.{sizes}"
        )
    return "\n".join(dict.fromkeys(sentences))
