"""Part of `compare_dual.py`: evaluations of a dual-encoder."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_runs import Evaluation, Sizes

from medvl.data import ShardSource
from medvl.eval import (
    ProbedEncoder,
    Results,
    change_classification,
    encode_features,
    image_text_retrieval,
    linear_probe,
    load_ensemble,
    load_prompts,
    open_for_evaluation,
    phrase_grounding,
    zero_shot,
)
from medvl.models import KAD, CARZero, DualEncoder, MedKLIP, RadZero
from medvl.schema import Inputs

ON_STATEMENTS = (RadZero, CARZero, MedKLIP, KAD)
"""Systems that compare statements, or ask about them: their zero-shot prompts are `statements`, without a negative."""


def _read(model: DualEncoder, sizes: Sizes, shards: str, **options: Any) -> Any:
    source = ShardSource(sizes.data / shards)
    return open_for_evaluation(source, model.transform, model.tokenizer, batch=64, workers=sizes.workers, **options)


def _zero_shot(checkpoint: Path, sizes: Sizes) -> Results:
    [model] = load_ensemble([checkpoint])
    prompts = load_prompts("statements" if isinstance(model, ON_STATEMENTS) else "chexpert_ensemble")
    return zero_shot([model], _read(model, sizes, "shards/test"), prompts, resamples=sizes.resamples).results


def _retrieval(checkpoint: Path, sizes: Sizes) -> Results:
    [model] = load_ensemble([checkpoint])
    return image_text_retrieval(model, _read(model, sizes, "shards/test"), resamples=sizes.resamples).results


def _grounding(checkpoint: Path, sizes: Sizes) -> Results:
    [model] = load_ensemble([checkpoint])
    loader = _read(model, sizes, "ms-cxr-shards/test")
    asks = isinstance(model, MedKLIP | KAD)
    options: dict[str, Any] = {"maps": "attention"} if asks else {"maps": "similarity", "smoothing": 0.7}
    return phrase_grounding(model, loader, **options, resamples=sizes.resamples).results


def _probe(checkpoint: Path, sizes: Sizes) -> Results:
    [model] = load_ensemble([checkpoint])
    encoder = ProbedEncoder.from_model(model, name=model.name)
    parts = (_read(model, sizes, f"shards/{split}") for split in ("train", "validate", "test"))
    features = [encode_features(encoder, part) for part in parts]
    return linear_probe(*features, fractions=(0.01,), resamples=sizes.resamples).results


def _change(checkpoint: Path, sizes: Sizes, *, use_prior: bool) -> Results:
    [model] = load_ensemble([checkpoint])
    loader = _read(model, sizes, "ms-cxr-t-shards/test", inputs=Inputs(prior_image=True))
    return change_classification(model, loader, use_prior=use_prior, resamples=sizes.resamples).results


EVALUATIONS: Mapping[str, Evaluation] = {
    "zero-shot": _zero_shot,
    "retrieval": _retrieval,
    "grounding": _grounding,
    "probe": _probe,
    "change": functools.partial(_change, use_prior=True),
    "change-without-prior": functools.partial(_change, use_prior=False),
}
