"""`medvl eval retrieval`: image-text retrieval by a dual-encoder, optionally re-ranked by a fusion-encoder."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.cli.eval_common import EvalOptions, print_results

if TYPE_CHECKING:
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.publish import WritePage
    from medvl.eval.retrieval.image_text import RetrievalResult

_EXAMPLES = 6
"""Queries of each direction on the page."""


def retrieval(shared: EvalOptions, *, rerank: Path | None = None, shortlist: int = 256) -> None:
    """Evaluate image-text retrieval in both directions; equal texts are positives of each other.

    Args:
        rerank: checkpoint of a fusion-encoder that re-ranks the shortlists of the dual-encoder; the same folder if the
            model is both.
        shortlist: candidates per query that are re-ranked.
    """
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.core.publish import default_folder, publish
    from medvl.eval.core.results import format_table
    from medvl.eval.retrieval.image_text import image_text_retrieval
    from medvl.eval.retrieval.rerank import ShortlistModel, reranked_retrieval
    from medvl.models import DualEncoder, FusionModel

    checkpoint, read = shared.checkpoint, functools.partial(
        open_for_evaluation, batch=shared.batch, workers=shared.workers
    )  # fmt: skip
    model = load_model(checkpoint, shared.device)
    if not isinstance(model, DualEncoder):
        raise unsupported_model(checkpoint, model, "give the checkpoint of a dual-encoder, and --rerank")
    source = open_source(shared.data, [checkpoint])
    loader = read(source, model.transform, model.tokenizer)
    if rerank is None:
        result = image_text_retrieval(
            model, loader, resamples=shared.resamples, checkpoint=checkpoint, examples=_EXAMPLES
        )
    else:
        shortlist_model = (
            None if rerank.resolve() == checkpoint.resolve() else ShortlistModel(model, loader, checkpoint)
        )
        fusion = model if shortlist_model is None else load_model(rerank, shared.device)
        if not isinstance(fusion, FusionModel):
            raise unsupported_model(rerank, fusion, "give the checkpoint of a fusion-encoder", field="rerank")
        if shortlist_model is not None:
            source = open_source(shared.data, [rerank])
            loader = read(source, fusion.transform, fusion.tokenizer)
        result = reranked_retrieval(
            fusion,
            loader,
            shortlist=shortlist,
            shortlist_model=shortlist_model,
            resamples=shared.resamples,
            checkpoint=rerank,
        )
    paths = publish(
        result.results,
        shared.out or default_folder(rerank or checkpoint, "retrieval"),
        predictions=result.predictions(),
        write_page=None if result.examples is None else _page(result, source),
        model=f"{model.name} ({checkpoint})",
        manifest=source.manifest,
    )
    print_results(format_table(result.results.rows), paths)


def _page(result: "RetrievalResult", source: "ShardSource") -> "WritePage":
    from medvl.eval.core.full_pass import samples_by_key
    from medvl.eval.retrieval.image_text_page import write_retrieval_page

    samples = samples_by_key(source)
    return functools.partial(
        write_retrieval_page,
        result,
        pixels=lambda key: source.pixels(samples[key][0]),
        labels=lambda key: samples[key][1].labels,
    )
