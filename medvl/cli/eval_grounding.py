"""`medvl eval grounding`: a checkpoint and a folder of shards with phrases and boxes in, a table and a page out."""

import functools
from pathlib import Path
from typing import Literal

from medvl.cli.eval_common import default_folder, load_model, open_shards, publish
from medvl.errors import ConfigError


def grounding(
    checkpoint: Path,
    data: Path,
    *,
    maps: Literal["attention", "similarity"] | None = None,
    unseen: Literal["background", "drop"] = "background",
    scale: Literal["unit", "signed", "none"] = "unit",
    smoothing: float = 0.0,
    out: Path | None = None,
    examples: int = 4,
    resamples: int = 1000,
    batch: int = 32,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Phrase grounding: is what a phrase says found within its boxes? Contrast to noise, pointing game, overlap.

    Args:
        checkpoint: folder of a checkpoint of a dual-encoder.
        data: folder of shards with phrases (ms-cxr) or with boxes (rsna, nih-cxr14), of patients that the model was not
            trained on.
        maps: attention of words to regions, or similarity of the phrase with patches; default the model's own.
        unseen: what pixels are that the model's crop cut off: background, so that a finding there is missed, or
            dropped from everything.
        scale: what thresholds are shares of: each map brought to 0..1, to -1..1, or as it is.
        smoothing: of maps of similarity, in cells of the grid.
        out: gets results.json, predictions.jsonl and index.html; default eval/grounding in the checkpoint's run.
        examples: images on the page for each finding.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.eval.core.results import format_table
    from medvl.eval.grounding.evaluate import phrase_grounding
    from medvl.eval.grounding.metrics import MapRules
    from medvl.eval.grounding.page import write_grounding_page
    from medvl.models import DualEncoder

    model = load_model(checkpoint, device)
    if not isinstance(model, DualEncoder):
        raise ConfigError(f"{checkpoint} is a {model.name}, which compares no phrase with regions: name a dual-encoder")
    loader = open_shards(model, checkpoint, data, batch, workers)
    result = phrase_grounding(
        model,
        loader,
        maps=maps,
        rules=MapRules(unseen=unseen, scale=scale),
        smoothing=smoothing,
        resamples=resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    folder = out or default_folder(checkpoint, "grounding")
    page = functools.partial(write_grounding_page, pixels=loader.source.pixels)
    table = format_table([row for row in result.results.rows if not row.metric.startswith("iou@")])
    publish(result, folder, page, model=f"{model.name} ({checkpoint})", source=loader.source, table=table)
