"""The `medvl eval` commands: one for each evaluation, made from its class, and two tools."""

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from medvl.cli.help import ClassCommands, Flat
from medvl.errors import ConfigError
from medvl.eval.registry import EVALUATIONS


def evaluation_command(name: str) -> Callable[..., None]:
    """Return the function of `medvl eval NAME`, made from the fields of the evaluation's class.

    Raises ConfigError where no evaluation has this name, or its package does not load.
    """
    from medvl.eval.core.open import OutputOptions
    from medvl.eval.evaluation import Evaluation, run_evaluation

    cls = EVALUATIONS.get(name)

    def command(evaluation: Evaluation, shared: OutputOptions) -> None:
        with joined_ranks(name, divides_batches=cls.divides_batches):
            outcome, paths = run_evaluation(evaluation, shared)
        if paths:
            print_results(outcome.table, paths, everything=shared.all)

    flat: Any = Flat  # the classes are known at run time only
    command.__annotations__ = {"evaluation": flat[cls], "shared": flat[cls.shared]}
    command.__doc__ = cls.__doc__
    return command


@contextlib.contextmanager
def joined_ranks(name: str, *, divides_batches: bool) -> Iterator[None]:
    """Join the ranks that torchrun started, for the command of this name; a single process joins
    none.

    Raises ConfigError if there are several ranks and the command does not divide the batches
    among them.
    """
    if not divides_batches:
        _check_alone(name)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    from medvl.train.parallel.distributed import join

    with join():
        yield


def _check_alone(name: str) -> None:
    """Raise ConfigError where torchrun started several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        message = (
            f"expected one process for medvl eval {name}, got several; start it without torchrun"
        )
        raise ConfigError(message, "unsupported", field="ranks")


_SCREEN_LINES = 38
_NOTE_LINES = 3  # parts up to this length are notes, which are always printed


def print_results(table: str, paths: Sequence[Path], *, everything: bool = False) -> None:
    """Print the tables of results, and the paths of the files written.

    Parts are separated by empty lines. Unless `everything` is set, tables are cut where the screen
    ends; their first lines are means.
    """
    tables = [part.splitlines() for part in table.split("\n\n")]
    notes = [lines for lines in tables if len(lines) <= _NOTE_LINES]
    left = _SCREEN_LINES - len(paths) - 2 - sum(len(lines) + 1 for lines in notes)
    shown: list[str] = []
    for lines in tables:
        kept = lines if everything or lines in notes else lines[: max(left, 0)]
        if len(kept) > 1 or lines in notes:
            shown += [*([""] if shown else []), *kept]
            left -= 0 if lines in notes else len(kept) + 1
    hidden = sum(map(len, tables)) - sum(bool(line) for line in shown)
    if hidden > 0:
        shown.append(f"... {hidden} more lines with --all, and on the page")
    print(*shown, "", *paths, sep="\n")


# `medvl eval calibrate`: probabilities for zero-shot scores.


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
        out: file to write; default RUN/eval/STEP/calibration/PROMPTS.json, or CHECKPOINT/eval/...
            outside of a run.
        replace: replace the calibration of another checkpoint in `out`.
    """
    from medvl.eval.classification.scored_images import LabelPolicy
    from medvl.eval.core.open import load_ensemble, open_for_evaluation, open_source
    from medvl.eval.core.results import check_output
    from medvl.eval.zero_shot_classification import calibration as fit
    from medvl.eval.zero_shot_classification.prompts import load_prompts
    from medvl.eval.zero_shot_classification.protocol import common_classes

    _check_alone("calibrate")
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


# `medvl eval before-after`: a start, and the model that was trained from it.


def before_after(
    start: Path,
    trained: Path,
    data: Path,
    shared: _Compute,
    *,
    prompts: str | None = None,
    wordings: tuple[str, ...] = (),
    sites: tuple[Path, ...] = (),
    train: Path | None = None,
    valid: Path | None = None,
    out: Path = Path("before-after"),
    replace: bool = False,
    resamples: int = 1000,
    all: bool = False,
) -> None:
    """Evaluate a start and the model that was trained from it, and write one page of their paired
    differences.

    Args:
        start: checkpoint that the training began with, a dual-encoder.
        trained: run or checkpoint after the training.
        data: folder of shards of patients that neither was trained on; labels give zero-shot
            classification, texts retrieval.
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file of your own.
        wordings: prompt sets of the same labels in other words.
        sites: folders of shards of other sites, for what the training costs there.
        train: folder of shards with labels, on which a linear probe of each image encoder is
            fitted; without it, no probe.
        valid: folder of shards of other patients, on which the penalty of the probe is chosen.
        out: folder for index.html, comparison.json and the evaluations.
        replace: replace evaluations of other checkpoints or data in `out`.
        resamples: bootstrap resamples.
        all: print all rows; by default, those that fit on one screen.
    """
    from medvl.eval.compare.page import BeforeAfter, format_comparison, write_comparison
    from medvl.eval.core.open import RunOptions

    _check_alone("before-after")
    both = BeforeAfter(
        start=start, trained=trained, data=data, prompts=prompts, wordings=wordings, sites=sites,
        train=train, valid=valid,
    )  # fmt: skip
    options = RunOptions(
        batch=shared.batch, workers=shared.workers, device=shared.device, replace=replace,
        resamples=resamples,
    )  # fmt: skip
    comparisons = both.compare(out, options)
    date = datetime.date.today().isoformat()
    paths = write_comparison(comparisons, out, title="Before and after training", date=date)
    print_results("\n\n".join(map(format_comparison, comparisons)), paths, everything=all)


# `medvl eval make-retrieval-list`: candidates and queries of `medvl eval class-retrieval`.


def make_retrieval_list(
    out: Path,
    *,
    data: Path | None = None,
    per_class: int = 200,
    classes: tuple[str, ...] = (),
    exclusive: Literal["all_labels", "classes"] = "all_labels",
    views: Literal["frontal", "all"] = "frontal",
    seed: int = 0,
    chexpert_8x200: Path | None = None,
    published: Path | None = None,
    salt_file: Path | None = None,
) -> str:
    """Write candidates and queries for class-retrieval: sampled once from shards, or as published.

    Args:
        out: file of the list.
        data: folder of shards to sample from: images that show exactly one class. The defaults are
            the rule of GLoRIA's 5x200, whose own draw its authors did not list.
        per_class: images per class.
        classes: class names; default the five of the CheXpert competition.
        exclusive: labels of which an image has no other, positive or uncertain: all of the shards
            except No Finding, or the classes.
        views: frontal views (and images without a view), or all.
        seed: seed of the sampling.
        chexpert_8x200: folder of ConVIRT's published lists (image-retrieval/ and text-retrieval/),
            instead of --data.
        published: published table of images of CheXpert or MIMIC-CXR with a column for each class,
            such as a chexpert_5x200.csv, instead of --data.
        salt_file: salt file of the shards; default $MEDVL_SALT_FILE or
            ~/.config/medvl/salt.
    """
    from medvl.data.privacy import Deidentifier, default_salt_file
    from medvl.eval.core.open import open_source
    from medvl.eval.retrieval.candidate_lists import (
        read_chexpert_8x200,
        read_published,
        sample_list,
    )
    from medvl.schema import COMPETITION_FINDINGS

    _check_alone("make-retrieval-list")
    given = [name for name in (data, chexpert_8x200, published) if name is not None]
    of_list = classes or COMPETITION_FINDINGS
    if data is not None and len(given) == 1:
        subset = sample_list(
            open_source(data),
            classes=of_list,
            per_class=per_class,
            seed=seed,
            exclusive=exclusive,
            views=views,
        )
    elif len(given) == 1:
        deid = Deidentifier.from_file(salt_file or default_salt_file())
        subset = (
            read_chexpert_8x200(chexpert_8x200, deid)
            if chexpert_8x200 is not None
            else read_published(given[0], deid, of_list)
        )
    else:
        message = (
            "expected --data to sample from, --chexpert-8x200 or --published; give exactly one"
        )
        raise ConfigError(message, "conflict", field="data")
    subset.write(out)
    return (
        f"Wrote {out}: {subset.name}, {len(subset.candidates)} candidates, "
        f"{len(subset.image_queries)} image queries and {len(subset.text_queries)} text queries of "
        f"{len(subset.classes)} classes, sha256 {subset.sha256[:12]}"
    )


COMMANDS = ClassCommands(
    EVALUATIONS,
    evaluation_command,
    {
        "calibrate": calibrate,
        "before-after": before_after,
        "make-retrieval-list": make_retrieval_list,
    },
)
"""Name after `medvl eval` -> function."""
