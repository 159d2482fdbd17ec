"""`medvl eval grounding`: phrase grounding by a dual-encoder."""

import functools
from typing import Literal

from medvl.cli.eval_common import SmallBatchOptions, print_results


def grounding(
    shared: SmallBatchOptions,
    *,
    maps: Literal["attention", "similarity"] | None = None,
    unseen: Literal["background", "drop"] = "background",
    scale: Literal["unit", "signed", "none"] = "unit",
    smoothing: float = 0.0,
    examples: int = 4,
) -> None:
    """Evaluate phrase grounding: contrast-to-noise ratio, pointing game and overlap with the boxes of each phrase.

    The checkpoint is a dual-encoder; the shards have phrases (ms-cxr) or boxes (rsna, nih-cxr14).

    Args:
        maps: attention of words to regions, or similarity of the phrase with patches; default that of the model.
        unseen: pixels that the center crop removed: background (a finding there counts as missed), or left out.
        scale: range to which each map is scaled before thresholds: 0..1, -1..1, or none.
        smoothing: Gaussian smoothing of similarity maps, in cells of the grid.
        examples: images on the page for each finding.
    """
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.core.publish import default_folder, publish
    from medvl.eval.core.results import format_table
    from medvl.eval.grounding.evaluate import phrase_grounding
    from medvl.eval.grounding.metrics import MapRules
    from medvl.eval.grounding.page import write_grounding_page
    from medvl.models import DualEncoder

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, DualEncoder):
        raise unsupported_model(shared.checkpoint, model, "give the checkpoint of a dual-encoder")
    source = open_source(shared.data, [shared.checkpoint])
    result = phrase_grounding(
        model,
        open_for_evaluation(source, model.transform, model.tokenizer, batch=shared.batch, workers=shared.workers),
        maps=maps,
        rules=MapRules(unseen=unseen, scale=scale),
        smoothing=smoothing,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=shared.checkpoint,
    )
    paths = publish(
        result.results,
        shared.out or default_folder(shared.checkpoint, "grounding"),
        predictions=result.predictions(),
        write_page=functools.partial(write_grounding_page, result, pixels=source.pixels),
        model=f"{model.name} ({shared.checkpoint})",
        manifest=source.manifest,
    )
    print_results(format_table([row for row in result.results.rows if not row.metric.startswith("iou@")]), paths)
