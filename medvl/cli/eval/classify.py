"""`medvl eval classify`: a trained multi-label classifier."""

import functools
from pathlib import Path

from medvl.cli.eval.options import EvalOptions, MeanOptions, open_evaluation, publish_result


def classify(shared: EvalOptions, label: MeanOptions, *, valid: Path | None = None) -> None:
    """Evaluate a classifier of recipes/linear_probe.py or recipes/classify_openi.py, with intervals and a page.

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it, no yes/no metrics.
    """
    from medvl.eval.classification import evaluate
    from medvl.eval.classification.page import write_classification_page
    from medvl.eval.core.open import open_source
    from medvl.models import LabelModel

    checkpoint, advice = shared.checkpoint, "train a classifier on it with recipes/linear_probe.py"
    output = shared.folder(checkpoint, "classify")
    model, source, read = open_evaluation(shared, LabelModel, advice, text=True)
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate.classify(
        model,
        read(source),
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_classification_page, result, pixels=source.pixels)
    publish_result(
        result,
        folder,
        page,
        f"{model.name} of {model.reads} ({checkpoint})",
        source.manifest,
        result.table(),
        options=shared,
    )
