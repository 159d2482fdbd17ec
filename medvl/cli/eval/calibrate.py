"""`medvl eval calibrate`: probabilities for zero-shot scores."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compute:
    """Compute options."""

    batch: int = 64
    """batch size"""
    workers: int = 2
    """loader processes"""
    device: str = "auto"
    """auto, cpu or cuda"""


def calibrate(
    checkpoint: Path,
    data: Path,
    shared: _Compute,
    *,
    prompts: str = "chexpert_ensemble",
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore",
    missing: Literal["ignore", "negative"] = "negative",
    out: Path | None = None,
    replace: bool = False,
) -> None:
    """Calibrate the zero-shot scores of a checkpoint on validation shards, for `medvl serve`.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best.
        data: folder of shards with labels, of patients that the model was not trained on.
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file of your own.
        uncertain: treatment of uncertain labels (-1).
        missing: treatment of missing labels.
        out: file to write; default RUN/eval/STEP/calibration/PROMPTS.json, or CHECKPOINT/eval/... outside of a run.
        replace: replace the calibration of another checkpoint in `out`.
    """
    from medvl.eval.classification.label_policy import LabelPolicy
    from medvl.eval.core.open import load_ensemble, open_for_evaluation, open_source
    from medvl.eval.core.publish import check_output
    from medvl.eval.zero_shot_classification import calibration as fit
    from medvl.eval.zero_shot_classification.evaluate import common_classes
    from medvl.eval.zero_shot_classification.prompts import load_prompts

    prompt_set = load_prompts(prompts)
    path = out or fit.calibration_path(checkpoint, prompt_set.name)
    check_output(path.parent)
    source = open_source(data, [checkpoint])
    common_classes(prompt_set.for_labels(source.label_names), source)
    (model,) = load_ensemble([checkpoint], shared.device)
    result = fit.calibrate(
        model,
        open_for_evaluation(source, model.transform, batch=shared.batch, workers=shared.workers),
        prompt_set,
        checkpoint=checkpoint,
        policy=LabelPolicy(uncertain=uncertain, missing=missing),
        data={"corpus": source.manifest.corpus, "split": source.manifest.split},
    )
    fit.write_calibration(result, path, replace=replace)
    print(fit.calibration_table(result), "", path, sep="\n")
