"""Part of `compare_fusion.py`: evaluations of a fusion-encoder."""

import dataclasses
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_runs import ROOT, Evaluation, Sizes

from medvl.data import QuestionSource, ShardSource
from medvl.eval import (
    Results,
    ShortlistModel,
    answer_questions,
    evaluate_answers,
    get_protocol,
    image_text_matching,
    load_ensemble,
    open_for_evaluation,
    question_data,
    reranked_retrieval,
)
from medvl.models import load

SHORTLIST = 16
SECTIONS = ("impression",)


def vqa_folder(checkpoint: Path, home: Path) -> Path:
    """Return the folder of the question answering that was fine-tuned from a checkpoint of a run."""
    run, *_ = checkpoint.relative_to(home).parts
    return home / run / f"vqa-{checkpoint.name}"


def _read(model: Any, sizes: Sizes, sections: tuple[str, ...] = SECTIONS) -> Any:
    source = ShardSource(sizes.data / "shards/test")
    return open_for_evaluation(
        source, model.transform, model.tokenizer, batch=64, workers=sizes.workers, sections=sections
    )


def _matching(checkpoint: Path, sizes: Sizes) -> Results:
    model = load(checkpoint)
    return image_text_matching(model, _read(model, sizes), resamples=sizes.resamples).results


def _retrieval(checkpoint: Path, sizes: Sizes) -> Results:
    seed = checkpoint.relative_to(sizes.home).parts[0].rsplit("-", 1)[1]
    [dual_encoder] = load_ensemble([sizes.home / f"convirt-{seed}" / "run/last"])
    model: Any = load(checkpoint)
    shortlist = ShortlistModel(dual_encoder, _read(dual_encoder, sizes))
    return reranked_retrieval(
        model, _read(model, sizes), shortlist=SHORTLIST, shortlist_model=shortlist, resamples=sizes.resamples
    ).results


def _vqa(checkpoint: Path, sizes: Sizes) -> Results:
    """Fine-tune with the recipe's preset `tiny` for a quarter of the steps of pretraining, and answer the test."""
    recipe = runpy.run_path(str(ROOT / "recipes/vqa_finetune.py"))
    tiny, run_dir = recipe["PRESETS"]["tiny"], vqa_folder(checkpoint, sizes.home)
    data, steps = sizes.data, max(1, sizes.steps // 4)
    schedule = dataclasses.replace(tiny.optim.schedule, warmup_steps=min(100, steps // 4))
    settings = dataclasses.replace(
        tiny,
        init_from=checkpoint,
        data=dataclasses.replace(
            tiny.data, train=data / "vqa/train", valid=data / "vqa-valid/test", workers=sizes.workers
        ),
        optim=dataclasses.replace(tiny.optim, schedule=schedule),
        train=dataclasses.replace(
            tiny.train,
            run_dir=run_dir,
            epochs=None,
            steps=steps,
            global_batch=sizes.batch,
            validate_every=steps,
            keep_last=1,
            tensorboard=False,
        ),
    )
    recipe["prepare"](settings).train()
    model: Any = load(run_dir / "last")
    train, test = ShardSource(data / "vqa/train"), ShardSource(data / "vqa/test")
    questions = QuestionSource(test, "test", model.config.answers, get_protocol("medvl").normalize)
    loader: Any = open_for_evaluation(
        questions, model.transform, model.tokenizer, batch=64, workers=sizes.workers, sections=("question",)
    )
    predictions = answer_questions(model, loader)
    return evaluate_answers(question_data([train, test]), predictions, resamples=sizes.resamples).results


EVALUATIONS: Mapping[str, Evaluation] = {"matching": _matching, "retrieval": _retrieval, "vqa": _vqa}
