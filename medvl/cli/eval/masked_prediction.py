"""`medvl eval masked-prediction`: words of report sentences that a language model fills in."""

import functools

from medvl.cli.eval.options import EvalOptions, publish_result


def masked_prediction(
    shared: EvalOptions,
    *,
    sections: tuple[str, ...] = ("findings", "impression"),
    limit: int | None = None,
    examples: int = 6,
) -> None:
    """Evaluate a language model on report sentences: findings, sides, severities and negations are hidden.

    The checkpoint is one of recipes/pubmedbert.py, bioalbert.py or continue_bert.py, or imported with its head
    (`medvl import bert_mlm`); the shards have texts.

    Args:
        sections: sections of the reports; for a report without any of them, the sections that describe the image.
        limit: maximum number of distinct sentences, from the start; default all.
        examples: wrong words of each kind on the page; 0 for a page without sentences.
    """
    from medvl.eval.core.open import load_model, open_source, unsupported_model
    from medvl.eval.masked_prediction.evaluate import evaluate_masked_prediction
    from medvl.eval.masked_prediction.page import write_masked_prediction_page
    from medvl.models.language.base import LanguageModel

    output = shared.folder(shared.checkpoint, "masked_prediction")
    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, LanguageModel):
        raise unsupported_model(shared.checkpoint, model, "give a language model with a head for masked words")
    source = open_source(shared.data, [shared.checkpoint])
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate_masked_prediction(
        model,
        source,
        sections=sections,
        limit=limit,
        batch=shared.batch,
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    page = functools.partial(write_masked_prediction_page, result, examples=examples)
    publish_result(result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared)
