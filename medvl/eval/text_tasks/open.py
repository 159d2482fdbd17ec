"""Text encoders for an evaluation: of a checkpoint, by name, or with random weights."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medvl.common.seeding import seeded
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.eval.core.open import load_model, unsupported_model
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.text_tasks.evaluate import EvaluatedEncoder
from medvl.models.locate import find_checkpoint

ATTENTION_DROPOUT = 0.1
"""Dropout of the attention in fine-tuning."""
_FIELD = "attention_probs_dropout_prob"


def encoder_of_checkpoint(checkpoint: Path, *, random: bool = False) -> EvaluatedEncoder:
    """Return the text encoder of a checkpoint, or the same encoder with random weights.

    Its attention has `ATTENTION_DROPOUT`, also where it was trained with another, such as 0 for packed texts.

    Raises CheckpointError for a checkpoint that cannot be loaded, ConfigError for a system without a text encoder or a
    checkpoint without a vocabulary.
    """
    model = load_model(checkpoint, "cpu")
    encoder = getattr(model, "text_encoder", None)
    if not isinstance(encoder, TextEncoder):
        raise unsupported_model(checkpoint, model, "give a system with a text encoder")
    vocabulary = find_checkpoint(checkpoint) / "tokenizer"
    if not vocabulary.is_dir():
        raise ConfigError(f"{checkpoint} has no vocabulary", "missing", field="checkpoint")
    dropout = _attention_dropout(encoder)
    create = functools.partial(create_text_encoder, **{**encoder.config, **dropout})
    return EvaluatedEncoder(
        name=f"{model.name} ({checkpoint}{', random weights' if random else ''})",
        make=functools.partial(_make, create, None if random else encoder.state_dict()),
        tokenizer=lambda length: load_tokenizer(vocabulary, max_tokens=length),
        max_tokens=encoder.max_tokens,
        attention_dropout=dropout.get(_FIELD),
        sha256=None if random else checkpoint_sha256(checkpoint),
    )


def encoder_by_name(
    name: str, vocabulary: Path, weights: str | None, arguments: Mapping[str, Any] | None = None
) -> EvaluatedEncoder:
    """Return a text encoder by name with weights from a file or the hub, or random ones for None.

    Its attention has `ATTENTION_DROPOUT`, unless the arguments have another value.

    Raises ConfigError for unknown names and arguments, WeightsError for weights that are not there or do not fit.
    """
    tokenizer = load_tokenizer(vocabulary)
    create = functools.partial(
        create_text_encoder,
        name,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        **(arguments or {}),
    )
    with seeded(0):
        first = create(pretrained=weights or False)
    settings = {**_attention_dropout(first), **(arguments or {})}
    create = functools.partial(create, **settings)
    return EvaluatedEncoder(
        name=f"{name}{'' if weights else ', random weights'}",
        make=functools.partial(_make, create, None if weights is None else first.state_dict()),
        tokenizer=lambda length: load_tokenizer(vocabulary, max_tokens=length),
        max_tokens=first.max_tokens,
        attention_dropout=settings.get(_FIELD),
    )


def _attention_dropout(encoder: TextEncoder) -> dict[str, float]:
    """Return the argument that sets the attention's dropout; none for a backbone without it, such as CLIP's."""
    return {_FIELD: ATTENTION_DROPOUT} if hasattr(getattr(encoder.backbone, "config", None), _FIELD) else {}


def _make(create: Callable[[], TextEncoder], state: Mapping[str, Any] | None, seed: int) -> TextEncoder:
    """Return a new encoder with random numbers from the seed, and with these weights if there are any."""
    with seeded(seed):
        encoder = create()
    if state is not None:
        encoder.load_state_dict(state)
    return encoder
