"""`medvl eval classify`: a classifier and a folder of shards in, a table, `results.json` and a page out."""

import functools
from pathlib import Path
from typing import Literal

from medvl.cli.eval_common import default_folder, load_model, open_textless, publish, refuse_seen
from medvl.errors import ConfigError


def classify(
    checkpoint: Path,
    data: Path,
    *,
    valid: Path | None = None,
    out: Path | None = None,
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore",
    missing: Literal["ignore", "negative"] = "negative",
    threshold_rule: Literal["f1", "mcc", "youden"] = "f1",
    resamples: int = 1000,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """A classifier that recipes/linear_probe.py trained, judged with intervals and a page.

    Args:
        checkpoint: folder of a classifier's checkpoint, such as runs/linear-probe/best.
        data: folder of shards with labels, of patients that it was not trained on.
        valid: folder of shards of other patients, on which thresholds are chosen; without it there are no yes/no
            metrics.
        out: gets results.json, predictions.jsonl and index.html; default eval/classify in the checkpoint's run.
        uncertain: what a label of -1 counts as.
        missing: what an absent label counts as.
        threshold_rule: what thresholds maximise on the validation images.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.data.shards.format import ShardSource
    from medvl.eval.classification.evaluate import classify as judge
    from medvl.eval.classification.label_policy import LabelPolicy
    from medvl.eval.classification.page import write_classification_page
    from medvl.models import Classifier

    model = load_model(checkpoint, device)
    if not isinstance(model, Classifier):
        raise ConfigError(f"{checkpoint} is a {model.name}: recipes/linear_probe.py makes a classifier of it")
    refuse_seen(checkpoint, ShardSource(data))
    loader = open_textless(model, data, batch, workers)
    result = judge(
        model,
        loader,
        valid_loader=None if valid is None else open_textless(model, valid, batch, workers),
        policy=LabelPolicy(uncertain=uncertain, missing=missing),
        threshold_rule=threshold_rule,
        resamples=resamples,
        checkpoint=checkpoint,
    )
    publish(
        result,
        out or default_folder(checkpoint, "classify"),
        functools.partial(write_classification_page, pixels=loader.source.pixels),
        model=f"{model.name} ({checkpoint})",
        source=loader.source,
        table=result.table(),
    )
