"""Causal language models of `transformers`: opening them, and packing texts into rows.

Letters: B texts, R rows, L tokens of a row, N tokens of a text, S targets, D width, V words.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medvl.common.files import sha256
from medvl.common.untrusted import parse_json, read_json
from medvl.errors import ConfigError, WeightsError

FAMILIES = ("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers have the names of `ADAPTED`."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers with low-rank updates: every linear layer but the output, as in LLaVA-Rad."""


def random_language(settings: str, vocab_size: int | None) -> Any:
    """Return a language model with random weights.

    Args:
        settings: of its configuration in `transformers`, as JSON, with `model_type`.
        vocab_size: number of words where the settings have none.

    Raises ConfigError for another family or an unknown setting.
    """
    import transformers

    values = parse_json(settings)
    _check_family(values, "language")
    kind = values.pop("model_type")
    if vocab_size is not None:
        values.setdefault("vocab_size", vocab_size)
    try:
        made = transformers.AutoConfig.for_model(kind, **values)
    except (TypeError, ValueError) as error:
        message = f"{kind} of transformers refuses these settings: {error}"
        raise ConfigError(message, "malformed", field="language") from error
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")


def open_language(folder: Path, expected_sha256: str = "") -> Any:
    """Return the language model of a folder with `config.json` and safetensors.

    Raises ConfigError for another family, WeightsError where files are missing, or weights are
    missing, unknown, or not those with the expected hash (`language_sha256`).
    """
    import transformers

    try:
        _check_family(read_json(folder / "config.json", WeightsError), "language_weights")
        if expected_sha256 and language_sha256(folder) != expected_sha256:
            message = f"{folder} has other weights than those that the checkpoint was trained with"
            raise WeightsError(message, "mismatch", field="language_weights")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except OSError as error:
        message = f"{folder} is no folder with config.json and safetensors of a language model"
        raise WeightsError(message, "not_found", field="language_weights") from error
    language, report = loaded
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        message = (
            f"{folder}: {len(wrong)} weights are missing, unknown or of another shape: {wrong[0]}"
        )
        raise WeightsError(message, "mismatch", field="language_weights")
    return language


def language_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder of `transformers`."""
    return sorted(folder.glob("*.safetensors"))


def language_sha256(folder: Path) -> str:
    """Return the sha256 of the hashes of a folder's files of weights and its `config.json`."""
    hashes = [sha256(path) for path in (folder / "config.json", *language_files(folder))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def settings_of(language: Any) -> str:
    """Return the settings of a language model as JSON, for `random_language`."""
    return json.dumps(language.config.to_diff_dict(), sort_keys=True)


def _check_family(settings: Any, field: str) -> None:
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind not in FAMILIES:
        message = f"expected a model_type among {', '.join(FAMILIES)}, got {kind}"
        raise ConfigError(message, "unsupported", field=field)


# Several texts in a row, none of which attends to another.


def assign_rows(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return the texts of each row, the longest first into the first row that has room for it.

    A text that is longer than `limit` has a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        length = lengths[text]
        row = next((number for number, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(limit)
        rows[row].append(text)
        room[row] -= length
    return rows


def packed_states(language: Any, texts: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Return the last states (N, D) of texts, from rows of at most `limit` tokens.

    Args:
        language: a causal language model of `transformers` that attends with SDPA.
        texts: (N, D) each: the embeddings of a text.
        limit: longest row, unless a text is longer.
    """
    rows = assign_rows([len(text) for text in texts], limit)
    states_RLD = pad_sequence([torch.cat([texts[text] for text in row]) for row in rows], True)
    device = states_RLD.device
    text_of = [torch.cat([torch.full((len(texts[text]),), text) for text in row]) for row in rows]
    place_of = [torch.cat([torch.arange(len(texts[text])) for text in row]) for row in rows]
    text_RL = pad_sequence(text_of, True, padding_value=-1).to(device)
    place_RL = pad_sequence(place_of, True).to(device)
    number_L = torch.arange(states_RLD.shape[1], device=device)
    # Padding is a text of its own, so that no row of the mask is empty.
    seen_RLL = (text_RL[:, :, None] == text_RL[:, None]) & (number_L <= number_L[:, None])
    last_RLD: Tensor = language.get_decoder()(
        inputs_embeds=states_RLD,
        attention_mask=seen_RLL[:, None],
        position_ids=place_RL,
        use_cache=False,
    ).last_hidden_state
    found: list[Tensor] = [last_RLD.new_empty(0)] * len(texts)
    for row, members in enumerate(rows):
        lengths = [len(texts[text]) for text in members]
        for text, part in zip(members, last_RLD[row, : sum(lengths)].split(lengths), strict=True):
            found[text] = part
    return found


def word_scores(language: Any, states_SD: Tensor) -> Tensor:
    """(S, V): scores of the word after each of some last states."""
    scores_SV: Tensor = language.get_output_embeddings()(states_SD)
    limit = getattr(language.config, "final_logit_softcapping", None)  # of Gemma 2
    return scores_SV if limit is None else limit * (scores_SV / limit).tanh()
