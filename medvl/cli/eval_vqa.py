"""`medvl eval vqa`: answers to the questions in a folder of shards in, a table, `results.json` and a page out."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.cli.eval_common import default_folder, load_model, print_report, refuse_seen
from medvl.common.files import sha256

if TYPE_CHECKING:
    from medvl.data.loading.vqa_source import QuestionSource
    from medvl.data.shards.format import ShardSource
    from medvl.eval.vqa.evaluate import VQAResult
    from medvl.eval.vqa.examples import Explain, Pixels
    from medvl.eval.vqa.predictions import Predictions
    from medvl.eval.vqa.protocol import VQAProtocol


def vqa(
    data: Path,
    *,
    checkpoint: Path | None = None,
    predictions: Path | None = None,
    train: Path | None = None,
    split: str = "test",
    protocol: str = "medvl",
    out: Path | None = None,
    resamples: int = 1000,
    examples: int = 6,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Visual question answering: accuracy with intervals, with baselines that see no image beside it, and a page.

    Args:
        data: folder of shards with questions.
        checkpoint: folder of a checkpoint of recipes/vqa_finetune.py, which answers them.
        predictions: answers of anything else in place of a checkpoint: JSON lines with id and answer, and score where
            it is known.
        train: folder of shards with the training questions, which the baselines learn from; default --data, for a
            corpus whose splits lie in one folder.
        split: of the questions that are judged.
        protocol: how answers are compared and who is judged; `medvl` is ours, others are those of published numbers.
        out: gets results.json, predictions.jsonl and index.html; default eval/vqa in the checkpoint's run, or beside
            the predictions.
        resamples: of the bootstrap.
        examples: hits, and as many misses, of closed and of open questions each, on the page.
        batch: questions at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.data.shards.format import ShardSource
    from medvl.errors import ConfigError
    from medvl.eval.vqa.evaluate import judge_answers
    from medvl.eval.vqa.predict import question_data
    from medvl.eval.vqa.protocol import get_protocol

    rules, shards = get_protocol(protocol), ShardSource(data)
    if checkpoint is not None and predictions is None:
        answered = _ask(checkpoint, shards, split, rules, batch, workers, device)
    elif predictions is not None and checkpoint is None:
        answered = _read(predictions)
    else:
        raise ConfigError("who answers? Name a --checkpoint or a file of --predictions, one of them")
    result = judge_answers(
        question_data([shards] if train is None or train.resolve() == data.resolve() else [ShardSource(train), shards]),
        answered.predictions,
        protocol=rules,
        split=split,
        resamples=resamples,
        inputs=answered.inputs,
    )
    _write(result, out or default_folder(answered.path, "vqa"), answered, _pixels(shards, split), examples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Answered:
    """Predictions, and whom they are from."""

    predictions: "Predictions"
    name: str
    path: Path
    inputs: Mapping[str, str]
    explain: "Explain | None" = None


def _ask(
    checkpoint: Path, shards: "ShardSource", split: str, rules: "VQAProtocol", batch: int, workers: int, device: str
) -> _Answered:
    from medvl.data.loading.vqa_source import QuestionSource
    from medvl.errors import ConfigError
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.vqa.explain import explain
    from medvl.eval.vqa.predict import answer_questions
    from medvl.models import VQA

    refuse_seen(checkpoint, shards)
    model = load_model(checkpoint, device)
    if not isinstance(model, VQA):
        raise ConfigError(f"{checkpoint} is a {model.name} and answers no questions: train recipes/vqa_finetune.py")
    source = QuestionSource(shards, split, model.config.answers, rules.normalize)
    return _Answered(
        predictions=answer_questions(model, _open(model, source, batch, workers)),
        name=f"{model.fusion_model.name} ({checkpoint})",
        path=checkpoint,
        inputs={"checkpoint": checkpoint_sha256(checkpoint)},
        explain=functools.partial(explain, model, source),
    )


def _read(predictions: Path) -> _Answered:
    from medvl.eval.vqa.predictions import read_predictions

    return _Answered(
        predictions=read_predictions(predictions),
        name=str(predictions),
        path=predictions,
        inputs={"predictions": sha256(predictions)},
    )


def _write(result: "VQAResult", out: Path, answered: _Answered, pixels: "Pixels", examples: int) -> None:
    from medvl.eval.core.results import write_results
    from medvl.eval.vqa.page import write_vqa_page

    paths = write_results(result.results, out, result.predictions())
    page = write_vqa_page(
        result,
        out / "index.html",
        model=answered.name,
        date=datetime.date.today().isoformat(),
        pixels=pixels,
        explain=answered.explain,
        examples=examples,
    )
    print_report(result.table(), [*paths, page])


def _pixels(shards: "ShardSource", split: str) -> "Pixels":
    from medvl.data.loading.vqa_source import asked_in

    places = {asked.question.id: asked.image for asked in asked_in(shards, split)}
    return lambda name: shards.pixels(places[name], color=True)


def _open(model: Any, source: "QuestionSource", batch: int, workers: int) -> Any:
    from medvl.data.loading.loader import open_loader
    from medvl.data.transforms.text import WholeText

    return open_loader(
        source,
        batch=batch,
        image=model.transform,
        text=WholeText(sections=("question",)),
        tokenizer=model.tokenizer,
        train=False,
        workers=workers,
    )
