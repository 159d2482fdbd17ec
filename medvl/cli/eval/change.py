"""`medvl eval change`: classification of change between two images, zero-shot or by a linear probe."""

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
    """Evaluate how well a dual-encoder distinguishes improving, stable and worsening findings, from pairs of images.

    The checkpoint is a dual-encoder; the shards have labels of change (ms-cxr-t).

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
    from medvl.models import DualEncoder
    from medvl.schema import Inputs

    sentences = load_change_prompts(prompts)
    model, source, read = open_evaluation(shared, DualEncoder, "give the checkpoint of a dual-encoder")
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
    name = "change" if folds is None else "change-probe"
    folder = shared.folder(shared.checkpoint, name if use_prior else f"{name}-without-prior")
    publish_result(result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, everything=shared.all)
