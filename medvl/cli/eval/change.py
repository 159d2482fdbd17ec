"""`medvl eval change`: classification of change between two images: zero-shot, by a linear probe or a classifier."""

import functools
from pathlib import Path

from medvl.cli.eval.options import EvalOptions, open_evaluation, publish_result


def change(
    shared: EvalOptions,
    *,
    prompts: Path | None = None,
    use_prior: bool = True,
    folds: int | None = None,
    examples: int = 4,
) -> None:
    """Evaluate how well a model distinguishes improving, stable and worsening findings, from pairs of images.

    The checkpoint is a dual-encoder, or a classifier of recipes/change_finetune.py, to which `prompts`, `use_prior` and
    `folds` do not apply; the shards have labels of change (ms-cxr-t).

    Args:
        prompts: JSON file with a list of sentences with {finding} for each of improving, stable and worsening.
        use_prior: give prior images to a model that takes them.
        folds: number of folds of patients over which a linear probe of the images' vectors is cross-validated, such as
            5; default zero-shot classification by the prompts.
        examples: pairs on the page, correct and wrong ones each.
    """
    from medvl.data.loading.priors import prior_positions
    from medvl.eval.change.evaluate import change_classification
    from medvl.eval.change.page import write_change_page
    from medvl.eval.change.prompts import load_change_prompts
    from medvl.eval.core.open import unsupported_model
    from medvl.models import ChangeClassifier, DualEncoder, System
    from medvl.schema import Inputs

    sentences = load_change_prompts(prompts)
    advice = "give the checkpoint of a dual-encoder or of a classifier of change"
    name = "change" if folds is None else "change-probe"
    output = shared.folder(shared.checkpoint, name if use_prior else f"{name}-without-prior")
    model, source, read = open_evaluation(shared, System, advice)
    if not isinstance(model, DualEncoder | ChangeClassifier):
        raise unsupported_model(shared.checkpoint, model, advice)
    folder = output.settle(manifest=source.fingerprint)
    result = change_classification(
        model,
        read(source, inputs=Inputs(prior_image=True)),
        sentences,
        use_prior=use_prior,
        folds=folds,
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    prior_N = prior_positions(source)
    page = functools.partial(
        write_change_page,
        result,
        pixels=source.pixels,
        prior_pixels=lambda position: source.pixels(int(prior_N[position])),
        examples=examples,
    )
    publish_result(result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared)
