"""`medvl eval grounding`: phrase grounding by a dual-encoder."""

import functools
from typing import Literal

from medvl.cli.eval.options import SmallBatchOptions, open_evaluation, publish_result


def grounding(
    shared: SmallBatchOptions,
    *,
    protocol: Literal["medvl", "biovil", "maco"] = "medvl",
    maps: Literal["attention", "similarity"] | None = None,
    unseen: Literal["background", "drop"] | None = None,
    scale: Literal["unit", "signed", "none"] | None = None,
    smoothing: float | None = None,
    examples: int = 4,
) -> None:
    """Evaluate phrase grounding: contrast-to-noise ratio, pointing game and overlap with the boxes of each phrase.

    The checkpoint is a dual-encoder; the shards have phrases (ms-cxr) or boxes (rsna, vindr-cxr, chestxdet10, ...).

    Args:
        protocol: settings by name. biovil: similarity smoothed by 1.5 cells, thresholds on the cosines, removed pixels
            left out, absolute contrast; maco: the same with maps scaled to -1..1 and signed contrast; medvl: the
            defaults of the next four, which only it can be combined with.
        maps: attention of words to regions, or similarity of the phrase with patches; default: the model's own.
        unseen: pixels that the center crop removed: background (a finding there counts as missed; default), or left
            out.
        scale: range to which each map is scaled before thresholds: 0..1 (default), -1..1, or none.
        smoothing: Gaussian smoothing of similarity maps, in cells of the grid; default none.
        examples: images on the page for each finding.
    """
    from medvl.eval.core.results import format_table
    from medvl.eval.grounding.evaluate import phrase_grounding
    from medvl.eval.grounding.metrics import MapRules
    from medvl.eval.grounding.page import write_grounding_page
    from medvl.models import DualEncoder

    checkpoint = shared.checkpoint
    rules = MapRules(unseen=unseen or "background", scale=scale or "unit") if unseen or scale else None
    output = shared.folder(checkpoint, "grounding")
    model, source, read = open_evaluation(shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True)
    folder = output.settle(manifest=source.fingerprint)
    result = phrase_grounding(
        model,
        read(source),
        protocol=protocol,
        maps=maps,
        rules=rules,
        smoothing=smoothing,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_grounding_page, result, pixels=source.pixels)
    table = format_table([row for row in result.results.rows if not row.metric.startswith("iou@")])
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, table, options=shared)
