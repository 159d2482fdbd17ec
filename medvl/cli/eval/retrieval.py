"""`medvl eval retrieval`: image-text retrieval by a dual-encoder, optionally re-ranked by a fusion-encoder."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.cli.eval.options import EvalOptions, open_evaluation, publish_result

if TYPE_CHECKING:
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.publish import WritePage
    from medvl.eval.retrieval.image_text import RetrievalResult

_EXAMPLES = 6
"""Queries of each direction on the page."""


def retrieval(shared: EvalOptions, *, rerank: Path | None = None, shortlist: int = 256) -> None:
    """Evaluate image-text retrieval in both directions; equal texts are positives of each other.

    Args:
        rerank: checkpoint of a fusion-encoder, or of recipes/retrieval_finetune.py on one, that re-ranks the shortlists
            of the dual-encoder; the same folder if the model is both.
        shortlist: candidates per query that are re-ranked.
    """
    from medvl.eval.core.open import load_model, open_source, unsupported_model
    from medvl.eval.retrieval.image_text import image_text_retrieval
    from medvl.eval.retrieval.rerank import ShortlistModel, reranked_retrieval
    from medvl.models import DualEncoder, FusionModel, RetrievalModel

    checkpoint, resamples = shared.checkpoint, shared.resamples
    output = shared.folder(rerank or checkpoint, "retrieval")
    advice = "give the checkpoint of a dual-encoder, and --rerank"
    model, source, read = open_evaluation(shared, DualEncoder, advice, text=True)
    loader, folder = read(source), output.settle(manifest=source.fingerprint)
    if rerank is None:
        result = image_text_retrieval(model, loader, resamples=resamples, checkpoint=checkpoint, examples=_EXAMPLES)
    else:
        same = rerank.resolve() == checkpoint.resolve()
        shortlist_model = None if same else ShortlistModel(model, loader, checkpoint)
        fusion = model if same else load_model(rerank, shared.device)
        fusion = fusion.as_matcher() if isinstance(fusion, RetrievalModel) else fusion
        if not isinstance(fusion, FusionModel):
            raise unsupported_model(rerank, fusion, "give the checkpoint of a fusion-encoder", field="rerank")
        if not same:
            source = open_source(shared.data, [rerank])
            loader = read(source, transform=fusion.transform, tokenizer=fusion.tokenizer)
        result = reranked_retrieval(
            fusion, loader, shortlist=shortlist, shortlist_model=shortlist_model, resamples=resamples, checkpoint=rerank
        )
    page = None if result.examples is None else _page(result, source)
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared)


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
