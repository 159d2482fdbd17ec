"""`medvl eval text`: a text encoder on BLURB and clinical sentence tasks, by fine-tuning."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.cli.eval.options import RunOptions, publish_result
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.eval.text_tasks.evaluate import EvaluatedEncoder, TextTaskOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoderOptions:
    """The text encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with a text encoder"""
    random_weights: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of a text encoder, or a folder in Hugging Face's layout"""
    vocab: Path | None = None
    """folder of the vocabulary of --encoder"""
    text_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default random ones"""
    text_arguments: Mapping[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    """arguments of --encoder, such as num_hidden_layers 3 hidden_size 192"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Grid of fine-tuning settings, of which the best one on the dev split is used, and the input of the head."""

    lrs: tuple[float, ...] = (1e-5, 3e-5, 5e-5)
    """learning rates"""
    batches: tuple[int, ...] = (16, 32)
    """batch sizes"""
    epochs: tuple[int, ...] = (20,)
    """numbers of epochs"""
    seeds: int | None = None
    """fine-tunings with the chosen setting; default as in the paper: ten for BIOSSES, PubMedQA, BioASQ, else five"""
    relation_form: Literal["dummies", "markers", "original"] = "dummies"
    """form of the two mentions in the text of a relation"""
    relation_pool: Literal["first", "mentions", "starts"] = "first"
    """input of the head for a relation: the first token, both mentions, or their first tokens"""
    train_limit: int | None = None
    """maximum number of training examples, from the start; default all"""
    bf16: bool = False
    """use 16-bit matrix products"""

    def settings(self, resamples: int) -> "TextTaskOptions":
        """Return the settings of the evaluation."""
        import torch

        from medvl.eval.text_tasks.evaluate import TextTaskOptions
        from medvl.eval.text_tasks.finetune import FinetuneGrid

        return TextTaskOptions(
            grid=FinetuneGrid(lrs=self.lrs, batches=self.batches, epochs=self.epochs),
            seeds=self.seeds,
            relation_form=self.relation_form,
            relation_pool=self.relation_pool,
            train_limit=self.train_limit,
            autocast=torch.bfloat16 if self.bf16 else None,
            resamples=resamples,
        )


def text(
    data: Path,
    text: TextEncoderOptions,
    tuning: FinetuneOptions,
    *,
    task: tuple[str, ...] = ("all",),
    out: Path | None = None,
    replace: bool = False,
    compare_random: bool = False,
    examples: int = 5,
    resamples: int = 1000,
    device: str = "auto",
    all: bool = False,
) -> None:
    """Evaluate a text encoder by fine-tuning on BLURB's tasks, MedNLI, RadNLI and sentence similarity.

    Learning rate, batch size and epochs are chosen on the dev split; every score is printed beside baselines without an
    encoder. data_cards/blurb.md lists the files of each task.

    Args:
        data: folder with a folder for each task.
        task: names of tasks; default all whose folder exists, of which incomplete ones are listed and skipped.
        out: folder for the output files; default RUN/eval/STEP/text, or CHECKPOINT/eval/text outside of a run.
        replace: replace results of another checkpoint in the output folder.
        compare_random: also fine-tune the same encoder from random weights, with paired differences.
        examples: mistakes of each task on the page; 0 for a page without texts.
        resamples: bootstrap resamples.
        device: auto, cpu or cuda.
        all: print all rows; by default, those that fit on one screen.
    """
    from medvl.eval.core.open import resolve_device
    from medvl.eval.text_tasks.evaluate import complete_tasks, evaluate_text_tasks
    from medvl.eval.text_tasks.page import write_text_page

    options, names = tuning.settings(resamples), task
    if task == ("all",):
        complete, left_out = complete_tasks(data, options)
        names = tuple(complete)
        for reason in left_out.values():
            print(f"Left out: {reason}", flush=True)
    if not names:
        raise ConfigError(f"{data} has no complete task; see data_cards/blurb.md", "not_found", field="data")
    outputs = RunOptions(out=out, replace=replace, all=all)
    output = outputs.folder(text.checkpoint, "text_random" if text.random_weights else "text", hashed=False)
    folder = output.settle()
    encoder = _open_encoder(text, random=text.random_weights)
    other = _open_encoder(text, random=True) if compare_random else None
    where = resolve_device(device)
    result = evaluate_text_tasks(
        encoder, data, names, options, other=other, device=where, report=functools.partial(print, flush=True)
    )
    page = functools.partial(write_text_page, result, examples=examples)
    publish_result(result, folder, page, encoder.name, str(data.name), options=outputs)


def _open_encoder(options: TextEncoderOptions, *, random: bool) -> "EvaluatedEncoder":
    from medvl.eval.text_tasks.open import encoder_by_name, encoder_of_checkpoint

    if (options.checkpoint is None) == (options.encoder is None):
        message = "expected --checkpoint or --encoder; give exactly one"
        raise ConfigError(message, "conflict", field="checkpoint")
    if options.checkpoint is not None:
        return encoder_of_checkpoint(options.checkpoint, random=random)
    if options.encoder is None or options.vocab is None:
        raise ConfigError("--encoder needs --vocab, the folder of its vocabulary", "missing", field="vocab")
    arguments: dict[str, Any] = dict(options.text_arguments)
    weights = None if random else options.text_weights
    return encoder_by_name(options.encoder, options.vocab, weights, arguments)
