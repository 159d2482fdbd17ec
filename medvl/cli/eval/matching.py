"""`medvl eval matching`: an image's own text against another text, and against its mirror."""

import functools

from medvl.cli.eval.options import EvalOptions, open_evaluation, publish_result


def matching(shared: EvalOptions, *, sections: tuple[str, ...] = (), examples: int = 4) -> None:
    """Evaluate whether a model prefers an image's own text to another patient's, and to the text with sides exchanged.

    The checkpoint is a dual-encoder, a fusion-encoder, or one of recipes/retrieval_finetune.py; the shards have texts.

    Args:
        sections: sections of the text; default the whole text.
        examples: images of each kind of mistake on the page.
    """
    from medvl.eval.matching.evaluate import image_text_matching
    from medvl.eval.matching.page import write_matching_page
    from medvl.models import RetrievalModel, System

    output = shared.folder(shared.checkpoint, "matching")
    model, source, read = open_evaluation(shared, System, "give a dual-encoder or a fusion-encoder", text=True)
    folder = output.settle(manifest=source.fingerprint)
    model = model.as_matcher() if isinstance(model, RetrievalModel) else model
    result = image_text_matching(
        model, read(source, sections=sections), resamples=shared.resamples, checkpoint=shared.checkpoint
    )
    page = functools.partial(write_matching_page, result, pixels=source.pixels, examples=examples)
    publish_result(result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared)
