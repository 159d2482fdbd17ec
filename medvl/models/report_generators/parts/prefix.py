"""A causal decoder over a prefix: the tokens of the images, and of what is known about a study; and
causal language models of `transformers`: opening them, and packing texts into rows.

Every token of the prefix attends to the whole prefix, and a token of the report to the prefix and
to the report up to itself, so the prefix never depends on the report. Its keys and values are
computed once for writing.

The decoder's layers are those of Llama (Touvron et al., arXiv 2302.13971), with the names of
`transformers`.

Letters: B samples or texts, R rows that are written (those of a sample side by side) or packed, P
tokens of the prefix, T tokens of the report, L tokens of a packed row, Q prompt tokens, W tokens
written before, N tokens of a sequence or text, S targets, V words, D width.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from medvl.common.files import sha256
from medvl.common.untrusted import parse_json, read_json
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError, WeightsError
from medvl.models.fusion_encoders.parts.encoder import Tokens, join
from medvl.models.fusion_encoders.parts.inputs import encode_present
from medvl.models.fusion_encoders.parts.transformer import (
    KeysValues,
    Sizes,
    open_empty_rows,
    split_heads,
)
from medvl.schema import Batch

RMS_EPS = 1e-6
ROPE_BASE = 10_000.0


def rotate(x_BHNd: Tensor, place_BN: Tensor) -> Tensor:
    """Rotate the halves of queries or keys by angles of their places (Su et al., arXiv
    2104.09864), as Llama in `transformers`.
    """
    half = x_BHNd.shape[-1] // 2
    rate_F = ROPE_BASE ** (-torch.arange(half, device=x_BHNd.device, dtype=torch.float32) / half)
    angle_B1NF = (place_BN[:, None, :, None].float() * rate_F).repeat(1, 1, 1, 2)
    first, second = x_BHNd.chunk(2, dim=-1)
    turned_BHNd = torch.cat([-second, first], dim=-1)
    cosine, sine = angle_B1NF.cos().to(x_BHNd.dtype), angle_B1NF.sin().to(x_BHNd.dtype)
    return x_BHNd * cosine + turned_BHNd * sine


class _Attention(nn.Module):
    """Multi-head attention with rotary places, without biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4)
        )

    def forward(
        self, states_BND: Tensor, place_BN: Tensor, mask_BNK: Tensor, before: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Return the states (B, N, D), and the keys and values of all tokens so far."""
        query = rotate(split_heads(self.q_proj(states_BND), self.heads), place_BN)
        key = rotate(split_heads(self.k_proj(states_BND), self.heads), place_BN)
        value = split_heads(self.v_proj(states_BND), self.heads)
        if before is not None:
            key = torch.cat([before[0], key], dim=2)
            value = torch.cat([before[1], value], dim=2)
        attended_BHNd = F.scaled_dot_product_attention(
            query, key, value, attn_mask=open_empty_rows(mask_BNK)[:, None]
        )
        return self.o_proj(attended_BHNd.transpose(1, 2).flatten(2)), (key, value)


class _FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.width, bias=False)

    def forward(self, states_BND: Tensor) -> Tensor:
        states: Tensor = self.down_proj(
            F.silu(self.gate_proj(states_BND)) * self.up_proj(states_BND)
        )
        return states


class _Layer(nn.Module):
    """Self-attention and feed-forward, each after a norm; dropout before each sum."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.mlp = _FeedForward(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=RMS_EPS)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=RMS_EPS)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(
        self, states_BND: Tensor, place_BN: Tensor, mask_BNK: Tensor, before: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        attended_BND, after = self.self_attn(
            self.input_layernorm(states_BND), place_BN, mask_BNK, before
        )
        states_BND = states_BND + self.dropout(attended_BND)
        output_BND = self.mlp(self.post_attention_layernorm(states_BND))
        return states_BND + self.dropout(output_BND), after


class PrefixDecoder(nn.Module):
    """Layers of Llama over a prefix and the report behind it, and a final norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=RMS_EPS)

    def forward(self, prefix: Tokens, text_BTD: Tensor) -> Tensor:
        """(B, T, D): states of the tokens of reports, which may be padded at their end."""
        real_BP = prefix.real_BN()
        place_BP = places(real_BP)
        count_B1 = real_BP.sum(dim=1, keepdim=True)
        place_T = torch.arange(text_BTD.shape[1], device=text_BTD.device)
        place_BN = torch.cat([place_BP, count_B1 + place_T], dim=1)
        states_BND = torch.cat([prefix.states_BND, text_BTD], dim=1)
        mask_BNN = prefix_mask(real_BP, text_BTD.shape[1])
        states_BND, _ = self._run(states_BND, place_BN, mask_BNN, None)
        return states_BND[:, real_BP.shape[1] :]

    def read(self, prefix: Tokens) -> "PrefixState":
        """Return the keys and values of the prefix, before the first token of a report."""
        real_BP = prefix.real_BN()
        mask_BPP = real_BP[:, None].expand(-1, real_BP.shape[1], -1)
        _, keys_values = self._run(prefix.states_BND, places(real_BP), mask_BPP, None)
        return PrefixState(tuple(keys_values), real_BP, real_BP.sum(dim=1))

    def write(self, text_RD: Tensor, state: "PrefixState") -> tuple[Tensor, "PrefixState"]:
        """Append a token to each report; return its states (R, D) and the state after it."""
        written_R1 = torch.ones_like(state.mask_RN[:, :1])
        mask_RN = torch.cat([state.mask_RN, written_R1], dim=1)
        states_R1D, keys_values = self._run(
            text_RD[:, None], state.place_R[:, None], mask_RN[:, None], state.keys_values
        )
        return states_R1D[:, 0], PrefixState(tuple(keys_values), mask_RN, state.place_R + 1)

    def _run(
        self,
        states_BND: Tensor,
        place_BN: Tensor,
        mask_BNK: Tensor,
        before: tuple[KeysValues, ...] | None,
    ) -> tuple[Tensor, list[KeysValues]]:
        cache = []
        for number, layer in enumerate(self.layers):
            states_BND, keys_values = layer(
                states_BND, place_BN, mask_BNK, None if before is None else before[number]
            )
            cache.append(keys_values)
        return self.norm(states_BND), cache


class PrefixState(NamedTuple):
    """Cache of a `PrefixDecoder` between two steps."""

    keys_values: tuple[KeysValues, ...]
    """Keys and values of the prefix and of the report so far, one entry a layer."""
    mask_RN: Tensor
    place_R: Tensor
    """Place of the next token."""

    def rows(self, index_R: Tensor) -> "PrefixState":
        """Select rows by index."""
        return PrefixState(
            tuple((key[index_R], value[index_R]) for key, value in self.keys_values),
            self.mask_RN[index_R],
            self.place_R[index_R],
        )


def places(real_BN: Tensor) -> Tensor:
    """(B, N) int64: number of each real token among the real ones; 0 at the first."""
    return (real_BN.long().cumsum(dim=1) - 1).clamp(min=0)


def prefix_mask(real_BP: Tensor, tokens: int) -> Tensor:
    """(B, P + T, P + T): the prefix attends to the prefix, a report also to itself up to each
    token; nothing to padding.
    """
    real_BN = F.pad(real_BP, (0, tokens), value=True)
    place_N = torch.arange(real_BN.shape[1], device=real_BP.device)
    in_prefix_N = place_N < real_BP.shape[1]
    earlier_NN = place_N[None, :] <= place_N[:, None]
    seen_NN = in_prefix_N[None, :] | (~in_prefix_N[:, None] & earlier_NN)
    return seen_NN & real_BN[:, None, :]


def image_patches(encoder: ImageEncoder, image: Tensor) -> Tensor:
    """(N, P, D): patches of images (N, C, H, W), or of their stored features (N, 1 + P, D), whose
    first one is the pooled vector.
    """
    if image.ndim == 3:
        return image[:, 1:].float()
    patches_NPD: Tensor = encoder(image).patches_BPD
    return patches_NPD


def encode_some(
    encode: Callable[[Tensor], Tokens], image: Tensor, has_B: Tensor | None, width: int
) -> Tokens:
    """Encode the images of the rows that have one; others have no token."""
    tokens = encode_present(has_B, width, encode, image)
    if has_B is None:
        return tokens
    return Tokens(tokens.states_BND, tokens.real_BN() & has_B[:, None])


def study_images(
    batch: Batch,
    image: Tokens,
    encode: Callable[[Tensor, Tensor | None, str], Tokens],
    *,
    views: int,
    prior: bool,
) -> Tokens:
    """Return the tokens of all images of each study: those of the prior, the image, its other
    views.

    Args:
        batch: its `other_views_BVCHW`, or `other_regions_BVPD`, and `prior_BCHW` may be missing.
        image: tokens of the first image.
        encode: function of pixels or stored features, of which rows have some, and of "image" or
            "prior image".
        views: maximum number of images without the prior.
        prior: whether to read the prior.
    """
    others_BV = batch.other_views_BVCHW
    if others_BV is None:
        others_BV = batch.other_regions_BVPD
    if views > 1 and others_BV is not None:
        others_BV = others_BV[:, : views - 1]
        has_other_BV = batch.has_other_view_BV
        # All views are encoded at once; those that are missing are not.
        others = encode(
            others_BV.flatten(0, 1),
            None if has_other_BV is None else has_other_BV[:, : views - 1].flatten(),
            "image",
        )
        states_BVPD = others.states_BND.unflatten(0, others_BV.shape[:2])
        mask_BVP = others.real_BN().view(states_BVPD.shape[:3])
        image = join(image, Tokens(states_BVPD.flatten(1, 2), mask_BVP.flatten(1, 2)))
    if prior and batch.prior_BCHW is not None:
        image = join(encode(batch.prior_BCHW, batch.has_prior_B, "prior image"), image)
    return image


def insert_images(
    prompt: Tokens, is_marker_BQ: Tensor, image: Tokens, *, left: bool = False
) -> Tokens:
    """Return the tokens of prompts with those of the images in place of each row's marker.

    Padding is at the end of each row, or with `left` at its beginning. Raises ConfigError unless
    every row has one marker.
    """
    is_marker_BQ = is_marker_BQ & prompt.real_BN()
    markers_B = is_marker_BQ.sum(dim=1)
    if bool((markers_B != 1).any()):
        count = int(markers_B[(markers_B != 1)][0])
        message = f"expected one image marker in each row of prompt_ids_BT, got {count}"
        raise ConfigError(message, "mismatch", field="prompt_ids_BT")
    rows = []
    image_BP = image.real_BN()
    real_BQ = prompt.real_BN()
    for row, place in enumerate(is_marker_BQ.long().argmax(dim=1).tolist()):
        before = prompt.states_BND[row, :place][real_BQ[row, :place]]
        after = prompt.states_BND[row, place + 1 :][real_BQ[row, place + 1 :]]
        rows.append(torch.cat([before, image.states_BND[row][image_BP[row]], after]))
    side = "left" if left else "right"
    states_BND = pad_sequence(rows, batch_first=True, padding_side=side)
    count_B1 = torch.tensor([len(row) for row in rows], device=states_BND.device)[:, None]
    place_N = torch.arange(states_BND.shape[1], device=states_BND.device)
    real_BN = place_N >= len(place_N) - count_B1 if left else place_N < count_B1
    return Tokens(states_BND, real_BN)


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
    states: list[Tensor] = [last_RLD.new_empty(0)] * len(texts)
    for row, members in enumerate(rows):
        lengths = [len(texts[text]) for text in members]
        for text, part in zip(members, last_RLD[row, : sum(lengths)].split(lengths), strict=True):
            states[text] = part
    return states


def word_scores(language: Any, states_SD: Tensor) -> Tensor:
    """(S, V): scores of the word after each of some last states."""
    scores_SV: Tensor = language.get_output_embeddings()(states_SD)
    limit = getattr(language.config, "final_logit_softcapping", None)  # of Gemma 2
    return scores_SV if limit is None else limit * (scores_SV / limit).tanh()
