"""`medvl eval`: a checkpoint and a folder of shards in, a table, `results.json` and a page out."""

import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from medvl.data.shards.format import ShardSource

_RETRIEVAL_EXAMPLES = 6
"""Queries of each direction on the page."""


def zero_shot(
    checkpoint: tuple[Path, ...],
    data: Path,
    *,
    valid: Path | None = None,
    prompts: str = "chexpert_ensemble",
    out: Path | None = None,
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore",
    missing: Literal["ignore", "negative"] = "negative",
    threshold_rule: Literal["f1", "mcc", "youden"] = "f1",
    resamples: int = 1000,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Zero-shot classification of a folder of shards, with intervals and a page.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best; several are an ensemble, whose scores are
            averaged.
        data: folder of shards with labels, of patients that the model was not trained on.
        valid: folder of shards of other patients, on which thresholds are chosen; without it there are no yes/no
            metrics.
        prompts: name of a prompt set (`medvl list prompts`) or a JSON file of your own.
        out: gets results.json, predictions.jsonl and index.html; default eval/zero_shot in the checkpoint's run, and
            eval/zero_shot_ensemble in that of the first of several.
        uncertain: what a label of -1 counts as.
        missing: what an absent label counts as.
        threshold_rule: what thresholds maximise on the validation images.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.eval.classification.label_policy import LabelPolicy
    from medvl.eval.zero_shot_classification.evaluate import zero_shot as judge
    from medvl.eval.zero_shot_classification.page import write_zero_shot_page

    models = load_ensemble(checkpoint, device)
    loader = open_shards(models[0], checkpoint[0], data, batch, workers)
    valid_loader = open_shards(models[0], checkpoint[0], valid, batch, workers) if valid is not None else None
    for member in checkpoint[1:]:
        refuse_seen(member, loader.source)
        if valid_loader is not None:
            refuse_seen(member, valid_loader.source)
    result = judge(
        models,
        loader,
        prompts,
        valid_loader=valid_loader,
        policy=LabelPolicy(uncertain=uncertain, missing=missing),
        threshold_rule=threshold_rule,
        resamples=resamples,
        checkpoint=checkpoint,
    )
    folder = out or default_folder(checkpoint[0], "zero_shot" if len(models) == 1 else "zero_shot_ensemble")
    told = f"{models[0].name} ({', '.join(map(str, checkpoint))})"
    page = functools.partial(write_zero_shot_page, pixels=loader.source.pixels)
    publish(result, folder, page, model=told, source=loader.source, table=result.table())


def retrieval(
    checkpoint: Path,
    data: Path,
    *,
    rerank: Path | None = None,
    shortlist: int = 256,
    out: Path | None = None,
    resamples: int = 1000,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Image-text retrieval in a folder of shards, both ways; equal texts are positives of each other.

    Args:
        checkpoint: folder of a checkpoint of a dual-encoder.
        data: folder of shards with text, of patients that the model was not trained on.
        rerank: folder of a checkpoint of a fusion-encoder, which puts the dual-encoder's shortlists in order; the same
            folder, where the model is both.
        shortlist: candidates of a query that are put in order.
        out: gets results.json, predictions.jsonl and, without rerank, index.html; default eval/retrieval in the run of
            the checkpoint that decides.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.errors import ConfigError
    from medvl.eval.core.results import format_table
    from medvl.eval.retrieval.image_text import image_text_retrieval
    from medvl.eval.retrieval.rerank import Shortlister, reranked_retrieval
    from medvl.models import DualEncoder, FusionModel

    model = load_model(checkpoint, device)
    if not isinstance(model, DualEncoder):
        raise ConfigError(f"{checkpoint} is a {model.name}, which compares nothing: name a dual-encoder, and --rerank")
    loader = open_shards(model, checkpoint, data, batch, workers)
    if rerank is None:
        result = image_text_retrieval(
            model, loader, resamples=resamples, checkpoint=checkpoint, examples=_RETRIEVAL_EXAMPLES
        )
    else:
        by = None if rerank.resolve() == checkpoint.resolve() else Shortlister(model, loader, checkpoint)
        fusion = model if by is None else load_model(rerank, device)
        if not isinstance(fusion, FusionModel):
            raise ConfigError(f"{rerank} is a {fusion.name}, which matches nothing: --rerank names a fusion-encoder")
        if by is not None:
            loader = open_shards(fusion, rerank, data, batch, workers)
        result = reranked_retrieval(fusion, loader, shortlist=shortlist, by=by, resamples=resamples, checkpoint=rerank)
    publish(
        result,
        out or default_folder(rerank or checkpoint, "retrieval"),
        None if result.view is None else _retrieval_page(loader.source),
        model=f"{model.name} ({checkpoint})",
        source=loader.source,
        table=format_table(result.results.rows),
    )


def _retrieval_page(source: "ShardSource") -> Callable[..., Path]:
    from medvl.eval.classification.scored_images import places
    from medvl.eval.retrieval.image_text_page import write_retrieval_page

    place_of = places(source)
    return functools.partial(
        write_retrieval_page,
        pixels=lambda key: source.pixels(place_of[key][0]),
        labels=lambda key: place_of[key][1].labels,
    )


def load_model(checkpoint: Path, device: str) -> Any:
    """The model of a checkpoint, in eval mode, on its device. Raises CheckpointError."""
    import torch

    from medvl.models import load

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load(checkpoint).to(device)


def load_ensemble(checkpoints: Sequence[Path], device: str) -> list[Any]:
    """The models of checkpoints whose scores can be averaged: all look at an image alike. All are held at once.

    Raises CheckpointError, and ConfigError where one prepares its images otherwise.
    """
    from medvl.errors import ConfigError

    models = [load_model(checkpoint, device) for checkpoint in checkpoints]
    for checkpoint, model in zip(checkpoints, models, strict=True):
        if model.transform != models[0].transform:
            raise ConfigError(
                f"{checkpoint} prepares images otherwise than {checkpoints[0]} ({model.transform} and "
                f"{models[0].transform}): an ensemble reads each image once, so judge them apart"
            )
    return models


def open_shards(model: Any, checkpoint: Path, data: Path, batch: int, workers: int) -> Any:
    """A loader over a folder of shards for evaluation.

    Raises SplitError when the checkpoint tells what it was trained on and a patient of the folder is among that.
    """
    from medvl.data.loading.loader import open_loader
    from medvl.data.shards.format import ShardSource
    from medvl.data.transforms.text import WholeText

    source = ShardSource(data)
    refuse_seen(checkpoint, source)
    return open_loader(
        source,
        batch=batch,
        image=model.transform,
        text=WholeText(),
        tokenizer=model.tokenizer,
        train=False,
        workers=workers,
        color=False,
    )


def open_textless(model: Any, data: Path, batch: int, workers: int) -> Any:
    """A loader over a folder of shards for evaluating a model that reads no text."""
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.subset import no_text
    from medvl.data.shards.format import ShardSource
    from medvl.data.transforms.text import WholeText

    return open_loader(
        ShardSource(data),
        batch=batch,
        image=model.transform,
        text=WholeText(),
        tokenizer=no_text,
        train=False,
        workers=workers,
    )


def refuse_seen(checkpoint: Path, source: "ShardSource") -> None:
    """Raise SplitError when the checkpoint tells what it was trained on and a patient of the shards is among that.

    A corpus that splits questions, not images, shares its images by design; its data card says what that means.
    """
    from medvl.data.annotations.questions import MIXED
    from medvl.data.shards.verify import check_against
    from medvl.models.checkpoint import train_manifest

    seen = train_manifest(checkpoint)
    if seen is not None and seen.salt == source.manifest.salt and source.manifest.split != MIXED:
        check_against(seen, source.manifest)


def default_folder(checkpoint: Path, task: str) -> Path:
    """`RUN/eval/TASK` for the checkpoint `RUN/best`."""
    return checkpoint.parent / "eval" / task


def publish(
    result: Any, folder: Path, write_page: Callable[..., Path] | None, *, model: str, source: "ShardSource", table: str
) -> None:
    """How every evaluation ends: results.json, predictions.jsonl and the page are written, the table printed.

    Args:
        result: has `results` and `predictions()`.
        folder: of the files; made where it is missing.
        write_page: writes the page of such a result; what is particular to it is bound already. Without it there is
            no page.
        model, source: whose result it is, and on which shards.
        table: what is printed, with the paths of the files below it.
    """
    from medvl.eval.core.results import write_results

    paths = write_results(result.results, folder, result.predictions())
    if write_page is not None:
        today, data = datetime.date.today().isoformat(), f"{source.manifest.corpus}, split {source.manifest.split}"
        paths.append(write_page(result, folder / "index.html", model=model, data=data, date=today))
    print_report(table, paths)


def print_report(table: str, paths: list[Path]) -> None:
    """The table, and where the files lie."""
    print(table)
    print()
    for path in paths:
        print(path)
