"""Tasks of a benchmark: evaluations of a checkpoint, the systems and corpora that they fit, and
their columns.
"""

import dataclasses
import gc
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark.config import BenchmarkConfig, Column, CorpusConfig, Family
from medvl.benchmark.settings import Run, with_settings
from medvl.benchmark.systems import recipe_module
from medvl.common.process import sigterm_interrupts
from medvl.data import QuestionSource, ShardSource
from medvl.errors import ERROR_CODES, EvaluationError
from medvl.eval import (
    ProbedEncoder,
    ShortlistModel,
    answer_questions,
    change_classification,
    encode_features,
    evaluate_answers,
    evaluate_reports,
    generate_reports,
    get_protocol,
    image_text_matching,
    image_text_retrieval,
    linear_probe,
    load_prompts,
    model_vocabulary,
    open_for_evaluation,
    phrase_grounding,
    question_data,
    reranked_retrieval,
    zero_shot,
)
from medvl.eval.core.full_pass import input_hashes
from medvl.eval.core.open import load_model, open_source
from medvl.eval.vqa.evaluate import GAIN, QUESTION_ONLY, subgroup_of
from medvl.eval.zero_shot_classification.evaluate import common_classes
from medvl.eval.zero_shot_classification.prompts import default_prompts
from medvl.models import (
    KAD,
    MAVL,
    MRM,
    DualEncoder,
    FusionModel,
    MedKLIP,
    R2Gen,
    System,
    VisualBERT,
    system,
)
from medvl.schema import Inputs
from medvl.train.recipe_files import find_recipe

# Tasks that are commands of medvl: their arguments for a run, and their execution.


def question_size(run: Run) -> int:
    """Return the side of the images on which a run is fine-tuned for questions, in pixels.

    It is that of the recipe for questions, or of the pretraining where a system reads images of one
    size.
    """
    cls = system(run.system)
    model = run.settings["model"]
    if getattr(cls, "numbers_cells", False) or (
        issubclass(cls, VisualBERT) and model["image_positions"]
    ):
        return int(model["image_size"])
    presets = recipe_module(find_recipe("vqa_finetune")).PRESETS
    return int(presets[run.preset if run.preset in presets else "tiny"].data.image.size)


def command_arguments(
    run: Run, name: str, *, checkpoint: Path = Path(), out: Path = Path()
) -> list[str]:
    """Return the arguments of a command. Raises EvaluationError where the corpus lacks what it
    reads.
    """
    [task] = [command for command in run.commands if command.name == name]
    fields = {
        field.name: getattr(run.corpus, field.name) for field in dataclasses.fields(run.corpus)
    }
    values = {name: value for name, value in fields.items() if isinstance(value, str)}
    values |= {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "resamples": str(run.evaluation.resamples),
    }
    values["question_size"] = str(question_size(run))
    try:
        return [part.format(**values) for part in shlex.split(task.command)]
    except (KeyError, IndexError) as error:
        message = f"corpus {run.corpus.name} has no {error} for the task {name}"
        raise EvaluationError(message, "unsupported", field=name) from None


def run_command(trained: "Trained", name: str, out: Path) -> None:
    """Run the command of a `CommandTask`, which writes results.json into `out`; on a CPU where the
    training was set to.

    Raises EvaluationError with the last line of its errors where it fails or writes none.
    """
    arguments = command_arguments(trained.run, name, checkpoint=trained.checkpoint, out=out)
    environment = os.environ | {ERROR_CODES: "1"}
    if trained.run.settings["train"]["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for is_end, part in itertools.groupby(arguments, lambda argument: argument == "&&"):
        if is_end:
            continue
        command = [sys.executable, "-m", "medvl", *part]
        with sigterm_interrupts():  # which stops the command
            ended = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False
            )
        if ended.returncode:
            break
    if ended.returncode or not (out / "results.json").is_file():
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        text, _, code = last.removeprefix("medvl: ").removesuffix("]").rpartition(" [")
        raise EvaluationError(f"{name}: {text or last}", code if text else "missing", field=name)


_MEAN = ("macro_competition", "macro")
_QUERY_SYSTEMS = (MedKLIP, KAD, MAVL)
"""Systems whose patches and texts have no common space: their maps are the decoder's attention."""
_ALONE = subgroup_of(QUESTION_ONLY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint of a run that is evaluated."""

    run: Run
    checkpoint: Path
    origin: Path
    """Checkpoint of the trained run, which names its training data and its detector: `checkpoint`,
    unless that has the weights before the training.
    """
    folder: Path
    """Folder for what an evaluation trains itself."""
    other: Callable[[str], Path]
    """Function that returns the checkpoint of a run that this one needs, by name; ConfigError
    unless it is trained.
    """

    def model(self, checkpoint: Path | None = None) -> Any:
        """Load a checkpoint, by default the evaluated one, onto the device that the run was
        trained on.
        """
        return load_model(checkpoint or self.checkpoint, self.run.settings["train"]["device"])


Evaluate = Callable[[Trained], Any]
"""Function that returns a result of `medvl.eval`: `results`, and `predictions()`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task with the systems that it fits and the folders of a corpus that it needs."""

    fits: Callable[[type[System]], bool]
    needs: tuple[str, ...] = ()
    evaluate: Evaluate
    columns: Callable[[BenchmarkConfig], tuple[Column, ...]]


def free_memory() -> None:
    """Give back the memory of what is not used any more, that of a GPU to its other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def _read(trained: Trained, model: Any, shards: str | Path | ShardSource, **options: Any) -> Any:
    """Return a loader of opened shards, or of a test folder, which no patient of the run's
    training may be in.
    """
    given = trained.run.evaluation
    source = shards if isinstance(shards, ShardSource) else open_source(shards, [trained.origin])
    return open_for_evaluation(
        source,
        model.transform,
        model.tokenizer,
        batch=given.batch,
        workers=given.workers,
        **options,
    )


def _test(trained: Trained) -> Path:
    return Path(trained.run.corpus.pairs) / "test"


def _labelled(trained: Trained) -> ShardSource:
    """Open the test shards. Raises EvaluationError where they have no labels, as corpora of
    texts alone.
    """
    source = open_source(_test(trained), [trained.origin])
    if not source.label_names:
        raise EvaluationError(f"{source.folder} has no labels", "unsupported", field="labels")
    return source


def _zero_shot(trained: Trained) -> Any:
    """Score the classes of the corpus's prompts, also by the statements of systems that are
    trained on them.
    """
    model = trained.model()
    loader = _read(trained, model, _labelled(trained))
    name = trained.run.corpus.prompts
    prompts = load_prompts(name)
    labels = tuple[str, ...]()
    if default_prompts(model) == "statements" and not name.endswith(".json"):
        labels = common_classes(prompts.for_labels(loader.source.label_names), loader.source)
        prompts = load_prompts("statements")
    return zero_shot(
        [model], loader, prompts, labels=labels, resamples=trained.run.evaluation.resamples
    )


def _retrieval(trained: Trained) -> Any:
    model = trained.model()
    return image_text_retrieval(
        model, _read(trained, model, _test(trained)), resamples=trained.run.evaluation.resamples
    )


def _grounding(trained: Trained) -> Any:
    model = trained.model()
    given = trained.run.evaluation
    phrases = trained.run.corpus.phrases
    assert phrases is not None
    options: dict[str, Any] = {"maps": "similarity", "smoothing": given.smoothing}
    if isinstance(model, _QUERY_SYSTEMS):
        options = {"maps": "attention"}
    return phrase_grounding(
        model, _read(trained, model, phrases), **options, resamples=given.resamples
    )


def _probe(trained: Trained) -> Any:
    model = trained.model()
    encoder = ProbedEncoder.from_model(model, name=model.name)
    home = Path(trained.run.corpus.pairs)
    _labelled(trained)  # refuses patients of its training data; a probe reads no regions
    sources = [
        open_source(home / split, synthetic=split == "train")
        for split in ("train", "validate", "test")
    ]
    features = [encode_features(encoder, _read(trained, model, source)) for source in sources]
    given = trained.run.evaluation
    return linear_probe(*features, fractions=given.label_shares, resamples=given.resamples)


def _change(trained: Trained) -> Any:
    model = trained.model()
    changes = trained.run.corpus.changes
    assert changes is not None
    if not model.inputs.prior_image:
        raise EvaluationError("the system reads no prior image", "unsupported", field="prior_image")
    loader = _read(trained, model, changes, inputs=Inputs(prior_image=True))
    return change_classification(
        model, loader, use_prior=True, resamples=trained.run.evaluation.resamples
    )


def _sections(trained: Trained) -> tuple[str, ...]:
    """Return the sections that the system was trained on; all that an evaluation reads where it
    draws them.
    """
    text = trained.run.settings["data"]["text"]
    return tuple(text.get("sections") or ("findings", "impression"))


def _matching(trained: Trained) -> Any:
    model = trained.model()
    loader = _read(trained, model, _test(trained), sections=trained.run.evaluation.sections)
    return image_text_matching(model, loader, resamples=trained.run.evaluation.resamples)


def _reranking(trained: Trained) -> Any:
    given = trained.run.evaluation
    sections = trained.run.evaluation.sections
    proposer = trained.other(given.shortlist_system)
    dual_encoder = trained.model(proposer)
    model = trained.model()
    test = open_source(_test(trained), [proposer])
    candidates = ShortlistModel(dual_encoder, _read(trained, dual_encoder, test, sections=sections))
    loader = _read(trained, model, _test(trained), sections=sections)
    return reranked_retrieval(
        model,
        loader,
        shortlist=given.shortlist,
        shortlist_model=candidates,
        resamples=given.resamples,
    )


def _questions(trained: Trained) -> Any:
    """Fine-tune with the recipe for questions, and answer those of the test."""
    run = trained.run
    run_dir = trained.folder / "run"
    corpus = run.corpus
    budget = run.budget
    assert corpus.questions is not None
    home = Path(corpus.questions)
    open_source(
        home / "test", [trained.origin]
    )  # refuses patients of its training data before the fine-tuning
    recipe = recipe_module(find_recipe("vqa_finetune"))
    preset = recipe.PRESETS[run.preset if run.preset in recipe.PRESETS else "tiny"]
    data: dict[str, Any] = {
        "train": home / "train",
        "valid": corpus.questions_valid,
        "valid_split": Path(corpus.questions_valid or "").name,
        "workers": budget.workers,
    }
    data["image"] = {"size": question_size(run)}
    train: dict[str, Any] = {
        "run_dir": run_dir,
        "keep_last": 1,
        "tensorboard": False,
        "seed": run.seed,
    }
    train |= {name: run.settings["train"][name] for name in ("packed_text", "device")}
    if budget.weights == "last":
        train |= {"best_metric": "loss", "best_mode": "min"}
    optim: dict[str, Any] = {}
    steps = budget.finetune_steps or (None if budget.steps is None else max(1, budget.steps // 4))
    if steps is not None:
        schedule = preset.optim.schedule
        optim["schedule"] = dataclasses.replace(
            schedule, warmup_steps=min(schedule.warmup_steps, 100, steps // 4)
        )
        train |= {"epochs": None, "steps": steps, "scale_below": None}
        if budget.weights == "last":
            train["validate_every"] = steps
    if budget.batch is not None:
        train["global_batch"] = budget.batch
    tree = {"init_from": trained.checkpoint, "data": data, "train": train, "optim": optim}
    recipe.prepare(with_settings(preset, tree, "questions")).train()
    free_memory()
    model = trained.model(run_dir / budget.weights)
    training = ShardSource(home / "train")
    test = open_source(home / "test", [run_dir / budget.weights])
    rules = get_protocol("medvl")
    questions: Any = QuestionSource(test, "test", model.config.answers, rules.normalize)
    given = run.evaluation
    loader: Any = open_for_evaluation(
        questions,
        model.transform,
        model.tokenizer,
        batch=given.batch,
        workers=given.workers,
        sections=("question",),
    )
    return evaluate_answers(
        question_data([training, test]),
        answer_questions(model, loader),
        vocabulary=model_vocabulary(model, rules),
        resamples=given.resamples,
        inputs={"manifest": test.fingerprint},
    )


def _reports(trained: Trained) -> Any:
    model = trained.model()
    run = trained.run
    sections = _sections(trained)
    inputs = Inputs(other_view=model.inputs.other_view)
    loader = _read(trained, model, Path(run.train_shards).parent / "test", inputs=inputs)
    reports = generate_reports(model, loader, sections=sections)
    return evaluate_reports(
        reports,
        resamples=run.evaluation.resamples,
        config={"sections": list(sections)},
        inputs=input_hashes(None, manifest=loader),
    )


def _is(*kinds: type[System]) -> Callable[[type[System]], bool]:
    return lambda cls: issubclass(cls, kinds)


def _fixed(*columns: Column) -> Callable[[BenchmarkConfig], tuple[Column, ...]]:
    return lambda config: columns


def _probe_columns(config: BenchmarkConfig) -> tuple[Column, ...]:
    shares = [f"{100 * share:g}%" for share in config.evaluation.label_shares]
    return tuple(
        Column(title=f"probe, {share}", metric=f"auroc@{share}", targets=_MEAN) for share in shares
    )


TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        fits=_is(DualEncoder),
        evaluate=_zero_shot,
        columns=_fixed(Column(title="zero-shot AUROC", metric="auroc", targets=_MEAN)),
    ),
    "retrieval": Task(
        fits=_is(DualEncoder),
        evaluate=_retrieval,
        columns=_fixed(
            Column(title="R@10 image to text", metric="recall@10", targets=("image_to_text",)),
            Column(title="R@10 text to image", metric="recall@10", targets=("text_to_image",)),
        ),
    ),
    "grounding": Task(
        fits=_is(DualEncoder),
        needs=("phrases",),
        evaluate=_grounding,
        columns=_fixed(
            Column(title="pointing game", metric="pointing_game", targets=("overall",)),
            Column(title="CNR", metric="cnr", targets=("overall",)),
        ),
    ),
    "probe": Task(fits=_is(DualEncoder, FusionModel, MRM, R2Gen), evaluate=_probe,
    columns=_probe_columns), "change": Task(
        fits=_is(DualEncoder),
        needs=("changes",),
        evaluate=_change,
        columns=_fixed(Column(title="change", metric="macro_accuracy", targets=("macro",))),
    ),
    "matching": Task(
        fits=_is(FusionModel),
        evaluate=_matching,
        columns=_fixed(
            Column(title="matching", metric="accuracy", targets=("all",)),
            Column(title="text above its mirror", metric="above_mirror", targets=("all",)),
        ),
    ),
    "reranking": Task(
        fits=_is(FusionModel),
        evaluate=_reranking,
        columns=_fixed(
            Column(title="R@1 image to text", metric="recall@1", targets=("image_to_text",)),
            Column(title="R@1 text to image", metric="recall@1", targets=("text_to_image",)),
        ),
    ),
    "questions": Task(
        fits=_is(FusionModel),
        needs=("questions", "questions_valid"),
        evaluate=_questions,
        columns=_fixed(
            Column(title="questions", metric="accuracy", targets=("overall",)),
            Column(title="question alone", metric="accuracy", targets=("overall",),
            subgroup=_ALONE), Column(title="gain over question alone", metric=GAIN,
            targets=("overall",)), Column(title="closed", metric="accuracy", targets=("closed",)),
            Column(title="open", metric="accuracy", targets=("open",)),
        ),
    ),
    "reports": Task(
        fits=lambda cls: hasattr(cls, "write_reports"),
        evaluate=_reports,
        columns=_fixed(
            Column(title="report F1", metric="f1", targets=("macro of five", "micro")),
            Column(title="BLEU-4", metric="corpus_bleu_4", targets=("report",)),
        ),
    ),
}  # fmt: skip


def fitting_tasks(
    config: BenchmarkConfig, name: str, family: Family, corpus: CorpusConfig
) -> tuple[str, ...]:
    """Return the tasks of a benchmark that fit a system and a corpus; a system may still not
    support one.
    """
    cls = system(name)
    fitting = [
        name
        for name, task in TASKS.items()
        if task.fits(cls) and all(getattr(corpus, need) is not None for need in task.needs)
    ]
    fitting += [
        command.name
        for command in config.commands
        if family in command.families and corpus.name in (command.corpora or (corpus.name,))
    ]
    return tuple(name for name in fitting if "all" in config.tasks or name in config.tasks)


def columns_of(config: BenchmarkConfig) -> dict[str, tuple[Column, ...]]:
    """Return task -> columns, of the tasks of a benchmark."""
    columns = {name: task.columns(config) for name, task in TASKS.items()}
    columns |= {command.name: command.columns for command in config.commands}
    columns |= {name: (*columns[name], *further) for name, further in config.columns.items()}
    return {
        name: found
        for name, found in columns.items()
        if "all" in config.tasks or name in config.tasks
    }


def tested_folder(run: Run, task: str) -> Path | None:
    """Return the shards that an evaluation is made on; None where a command names none, or the
    corpus has none.
    """
    if task not in TASKS:
        try:
            arguments = command_arguments(run, task)
        except EvaluationError:
            return None
        given = [
            value for name, value in itertools.pairwise(arguments) if name in ("--data", "--test")
        ]
        return Path(given[-1]) if given else None
    corpus = run.corpus
    if task in ("grounding", "change"):
        return Path((corpus.phrases if task == "grounding" else corpus.changes) or "")
    home = {"questions": corpus.questions or "", "reports": str(Path(run.train_shards).parent)}.get(
        task, corpus.pairs
    )
    return Path(home) / "test"
