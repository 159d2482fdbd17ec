"""`medvl eval classify`: a trained multi-label classifier."""

import functools
from pathlib import Path

from medvl.cli.eval_common import EvalOptions, LabelOptions, print_results


def classify(shared: EvalOptions, label: LabelOptions, *, valid: Path | None = None) -> None:
    """Evaluate a classifier that recipes/linear_probe.py trained, with intervals and a page.

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it, no yes/no metrics.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.eval.classification import evaluate
    from medvl.eval.classification.page import write_classification_page
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model
    from medvl.eval.core.publish import default_folder, publish
    from medvl.models import Classifier

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, Classifier):
        raise unsupported_model(shared.checkpoint, model, "train a classifier on it with recipes/linear_probe.py")
    read = functools.partial(open_for_evaluation, transform=model.transform, batch=shared.batch, workers=shared.workers)
    source = open_source(shared.data, [shared.checkpoint])
    result = evaluate.classify(
        model,
        read(source),
        valid_loader=None if valid is None else read(ShardSource(valid)),
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    paths = publish(
        result.results,
        shared.out or default_folder(shared.checkpoint, "classify"),
        predictions=result.predictions(),
        write_page=functools.partial(write_classification_page, result, pixels=source.pixels),
        model=f"{model.name} ({shared.checkpoint})",
        manifest=source.manifest,
    )
    print_results(result.table(), paths)
