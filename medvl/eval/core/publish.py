"""Output files of an evaluation: results.json, predictions.jsonl and an HTML page in one folder."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from medvl.data.shards.format import Manifest
from medvl.eval.core.results import Results, write_results
from medvl.models.locate import find_checkpoint, on_hub


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageHeader:
    """Names of model and data on a page."""

    model: str
    """Display name, shown with the hash of the checkpoint."""
    data: str
    """Display name, shown with the hash of the manifest."""
    date: str | None = None
    """Display date; None for none."""


WritePage = Callable[[Path, PageHeader], Path]
"""A writer of the HTML page that returns its path, with the result and its own options already bound."""


def default_folder(checkpoint: Path, task: str) -> Path:
    """Return `RUN/eval/TASK` for the checkpoint `RUN/best` or the run `RUN`, and `eval/TASK` for a model of the hub."""
    return (Path() if on_hub(checkpoint) else find_checkpoint(checkpoint).parent) / "eval" / task


def publish(
    results: Results,
    folder: Path,
    *,
    predictions: Iterable[Mapping[str, Any]] | None = None,
    write_page: WritePage | None = None,
    model: str,
    data: Manifest | str,
) -> list[Path]:
    """Write the files of an evaluation and return their paths.

    Args:
        results: the metric rows with settings and hashes, for results.json.
        folder: folder of the files; created if missing.
        predictions: lines of predictions.jsonl; None for no such file.
        write_page: writer of index.html, called with today's date; None for no page.
        model: name of the model on the page.
        data: manifest of the evaluated shards, or a name, for the page.
    """
    paths = write_results(results, folder, predictions)
    if write_page is not None:
        named = data if isinstance(data, str) else f"{data.corpus}, split {data.split}"
        header = PageHeader(model=model, data=named, date=datetime.date.today().isoformat())
        paths.append(write_page(folder / "index.html", header))
    return paths
