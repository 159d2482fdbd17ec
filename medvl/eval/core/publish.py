"""Output files of an evaluation: results.json, predictions.jsonl and an HTML page in one folder."""

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from medvl.data.shards.format import Manifest
from medvl.eval.core.results import Results, write_results
from medvl.models.locate import find_checkpoint, on_hub


class WritePage(Protocol):
    """A writer of the HTML page, with the result and its own options already bound."""

    def __call__(self, path: Path, *, model: str, data: str, date: str) -> Path:
        """Write the page and return its path."""


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
        today = datetime.date.today().isoformat()
        paths.append(write_page(folder / "index.html", model=model, data=named, date=today))
    return paths
