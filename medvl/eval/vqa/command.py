"""`medvl eval vqa`: a checkpoint and a folder of shards with questions in, a table and `results.json` out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.eval.command import default_folder, load_model, print_report, refuse_seen

if TYPE_CHECKING:
    from medvl.data.questions import QuestionSource


def vqa(
    checkpoint: Path,
    data: Path,
    *,
    train: Path | None = None,
    split: str = "test",
    protocol: str = "medvl",
    out: Path | None = None,
    resamples: int = 1000,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Visual question answering: accuracy with intervals, with baselines that see no image beside it.

    Args:
        checkpoint: folder of a checkpoint of recipes/vqa_finetune.py.
        data: folder of shards with questions.
        train: folder of shards with the training questions, which the baselines learn from; default --data, for a
            corpus whose splits lie in one folder.
        split: of the questions that are judged.
        protocol: how answers are compared and who is judged; `medvl` is ours, others are those of published numbers.
        out: gets results.json and predictions.jsonl; default eval/vqa in the checkpoint's run.
        resamples: of the bootstrap.
        batch: questions at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.data.questions import QuestionSource
    from medvl.data.shards import ShardSource
    from medvl.errors import ConfigError
    from medvl.eval.results import checkpoint_sha256, write_results
    from medvl.eval.vqa.answer import answer_questions, question_data
    from medvl.eval.vqa.judge import judge_answers
    from medvl.eval.vqa.protocol import get_protocol
    from medvl.models import VQA

    rules = get_protocol(protocol)
    shards = ShardSource(data)
    refuse_seen(checkpoint, shards)
    model = load_model(checkpoint, device)
    if not isinstance(model, VQA):
        raise ConfigError(f"{checkpoint} is a {model.name} and answers no questions: train recipes/vqa_finetune.py")
    source = QuestionSource(shards, split, model.config.answers, rules.normalize)
    result = judge_answers(
        question_data([shards] if train is None else [ShardSource(train), shards]),
        answer_questions(model, _open(model, source, batch, workers)),
        protocol=rules,
        split=split,
        resamples=resamples,
        inputs={"checkpoint": checkpoint_sha256(checkpoint)},
    )
    paths = write_results(result.results, out or default_folder(checkpoint, "vqa"), result.predictions())
    print_report(result.table(), paths)


def _open(model: Any, source: "QuestionSource", batch: int, workers: int) -> Any:
    from medvl.data.loader import open_loader
    from medvl.data.text import WholeText

    return open_loader(
        source,
        batch=batch,
        image=model.transform,
        text=WholeText(sections=("question",)),
        tokenizer=model.tokenizer,
        train=False,
        workers=workers,
    )
