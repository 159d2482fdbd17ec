"""`medvl eval zero-shot`: zero-shot classification by a dual-encoder."""

import functools
from pathlib import Path

from medvl.cli.eval.options import MeanOptions, RunOptions, publish_result


def zero_shot(
    checkpoint: tuple[Path, ...],
    data: Path,
    shared: RunOptions,
    label: MeanOptions,
    *,
    valid: Path | None = None,
    prompts: str | None = None,
    labels: tuple[str, ...] = (),
) -> None:
    """Evaluate zero-shot classification on a folder of shards, with intervals and a page.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best; the scores of several are averaged (ensemble).
        data: folder of shards with labels, of patients that the model was not trained on.
        valid: folder of shards of other patients, on which thresholds are chosen; without it, no yes/no metrics.
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file of your own, of the format in
            docs/pages/guides/evaluation.md; default chexpert_ensemble, and statements for systems that are trained on
            statements (RadZero, CARZero, MedKLIP, KAD, MAVL).
        labels: findings to evaluate; default all that have prompts and are labels of the shards.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import load_ensemble, open_for_evaluation, open_source
    from medvl.eval.zero_shot_classification import evaluate
    from medvl.eval.zero_shot_classification.page import write_zero_shot_page
    from medvl.eval.zero_shot_classification.prompts import load_prompts

    task = "zero_shot" if len(checkpoint) == 1 else "zero_shot_ensemble"
    output = shared.folder(checkpoint[0], task, hashed=len(checkpoint) == 1)
    prompt_set, source = None if prompts is None else load_prompts(prompts), open_source(data, checkpoint)
    if prompt_set is not None:
        # errors of prompts and data come before the models are loaded
        evaluate.common_classes(prompt_set.for_labels(source.label_names, labels), source)
    folder = output.settle(manifest=source.fingerprint)
    models = load_ensemble(checkpoint, shared.device)
    read = functools.partial(
        open_for_evaluation,
        transform=models[0].transform,
        tokenizer=models[0].tokenizer,
        batch=shared.batch,
        workers=shared.workers,
        ranks=rank_and_world(),
    )
    result = evaluate.zero_shot(
        models,
        read(source),
        prompt_set,
        labels=labels,
        valid_loader=None if valid is None else read(open_source(valid, checkpoint)),
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_zero_shot_page, result, pixels=source.pixels)
    name = f"{models[0].name} ({', '.join(map(str, checkpoint))})"
    publish_result(result, folder, page, name, source.manifest, result.table(), options=shared)
