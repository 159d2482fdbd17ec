"""Text backbones with random weights: Hugging Face encoders, open_clip's text encoders, word vector
tables.

Weights are initialised by the library, from torch's global generator.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from medvl.common.untrusted import ANYWHERE
from medvl.encoders.hugging_face import (
    CONFIG_FILE,
    PAIRS,
    TEXT_KINDS,
    check_activation,
    check_fields,
    read_config,
    read_tower,
)
from medvl.encoders.presets import OPEN_CLIP_CUSTOM
from medvl.encoders.text.adapters import (
    AlbertAdapter,
    BertAdapter,
    ClipAdapter,
    FullModelAdapter,
    MatrixHead,
    StaticAdapter,
    TextAdapter,
    TextBackbone,
    TowerAdapter,
)
from medvl.errors import ConfigError, WeightsError

_BERT_LIKE = ("bert", "roberta", "camembert", "xlm-roberta")
_EAGER_ONLY = ("mpnet",)
"""Model types of transformers without the fused attention of torch."""
_WITH_POOLER = (*_BERT_LIKE, "albert", "mpnet")
_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "context_length",
    "pad_token_id": "pad_id",
}
"""Hugging Face's names of sizes -> open_clip's names."""
UNBOUNDED = 1_000_000
"""`max_tokens` of an encoder without position embeddings."""


def read_folder(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (model type, fields that differ from the type's defaults) of a Hugging Face folder's
    `config.json`.

    Code in the folder is never run. Of a folder with two towers (SigLIP, CLIP), the text tower is
    read.

    Raises:
        ConfigError: "not_found" if the file is missing, "malformed" if it does not describe a model
            of transformers, "unsupported" for an activation that transformers does not have.
    """
    import transformers

    path = folder / CONFIG_FILE
    content = read_config(folder)
    if content["model_type"] in (*PAIRS, *TEXT_KINDS):
        return read_tower(folder, "text")
    try:
        # CXR-BERT is a plain BERT
        model_type = "bert" if content["model_type"] == "cxr-bert" else str(content["model_type"])
        defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} describes no transformers model: {error}", "malformed", field="name"
        ) from None
    fields = {
        key: value
        for key, value in content.items()
        if key in defaults
        and key != "model_type"
        and isinstance(value, bool | int | float | str)
        and value != defaults[key]
    }
    fields.pop("dtype", None)
    return model_type, fields


def build_hugging_face(model_type: str, arguments: Mapping[str, Any]) -> TextBackbone:
    """Build an encoder of transformers from its model type and the fields of its configuration.

    Attention uses torch's `scaled_dot_product_attention`. BERT's pooler is not built, because no
    published system uses it.

    Raises:
        ConfigError: "unknown_name" for the type or a field, "out_of_range" if transformers rejects
            the values.
    """
    import transformers

    try:
        defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    except (KeyError, ValueError):
        near = difflib.get_close_matches(model_type, transformers.CONFIG_MAPPING, n=3)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else "give a type such as bert, or a local folder of a model"
        )
        message = (
            f"transformers has no model type {model_type!r} and there is no such folder: {hint}"
        )
        raise ConfigError(message, "unknown_name", field="name") from None
    check_fields(f"hf:{model_type}", arguments, defaults)
    options = {"add_pooling_layer": False} if model_type in _WITH_POOLER else {}
    try:
        config = transformers.AutoConfig.for_model(model_type, **arguments)
        attention = "eager" if model_type in _EAGER_ONLY else "sdpa"
        net: Any = transformers.AutoModel.from_config(
            config, attn_implementation=attention, **options
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"cannot build {model_type} with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    adapter: TextAdapter = FullModelAdapter()
    if model_type in _BERT_LIKE:
        adapter = BertAdapter()
    elif model_type == "albert":
        adapter = AlbertAdapter()
    padding = config.pad_token_id or 0
    # RoBERTa-like models
    positions_start_after_padding = hasattr(getattr(net, "embeddings", None), "padding_idx")
    return TextBackbone(
        net=net,
        adapter=adapter,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        pad_id=padding,
        max_tokens=config.max_position_embeddings
        - (padding + 1 if positions_start_after_padding else 0),
        num_layers=config.num_hidden_layers,
        block_prefix="encoder.layer." if model_type in _BERT_LIKE else None,
        positions_start_after_padding=positions_start_after_padding,
    )


def build_text_tower(kind: str, arguments: Mapping[str, Any], projection: bool) -> TextBackbone:
    """Build the text tower of a SigLIP or CLIP of transformers.

    Args:
        kind: model type, one of `medvl.encoders.hugging_face.TEXT_KINDS`.
        arguments: fields of its configuration that differ from its defaults; `projection_dim`
            (CLIP) and `projection_size` (SigLIP) are the width of the projection.
        projection: whether to keep the projection into the shared space.

    Raises:
        ConfigError: "unknown_name" for a field, "unsupported" for an activation, "out_of_range" if
            transformers rejects the values.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    name = f"hf:{kind}"
    check_fields(name, arguments, transformers.AutoConfig.for_model(kind).to_dict())
    if "hidden_act" in arguments:
        check_activation(arguments["hidden_act"], name)
    is_siglip = kind == "siglip_text_model"
    network = transformers.SiglipTextModel if is_siglip else transformers.CLIPTextModel
    try:
        config: Any = transformers.AutoConfig.for_model(
            kind, **arguments, attn_implementation="sdpa"
        )
        net: Any = network(config)
    except (StrictDataclassError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        message = f"transformers cannot build {name} with {dict(arguments)}: {error}"
        raise ConfigError(message, "out_of_range") from error
    width = config.hidden_size
    projected = config.projection_size if is_siglip else config.projection_dim
    head: nn.Linear | None = None
    if is_siglip:
        head = net.head
        net.head = nn.Identity()
    elif projection:
        head = nn.Linear(width, projected, bias=False)
        nn.init.normal_(head.weight, std=config.initializer_factor * width**-0.5)
    return TextBackbone(
        net=net,
        adapter=TowerAdapter(net, is_causal=not is_siglip),
        width=width,
        vocab_size=config.vocab_size,
        pad_id=config.pad_token_id or 0,
        max_tokens=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        block_prefix="encoder.layers.",
        projection=head if projection else None,
        projected_width=projected,
    )


def build_open_clip(name: str, arguments: Mapping[str, Any], projection: bool) -> TextBackbone:
    """Build the text encoder of an open_clip model.

    Args:
        name: open_clip's name of the model, or "custom" for a model that `arguments` describes.
        arguments: fields of `open_clip.CLIPTextCfg`, and `embed_dim`, that differ from the named
            model's; sizes may also have Hugging Face's names.
        projection: whether to keep the projection into the shared space.

    Raises:
        ConfigError: "unknown_name" for the name or a field, "unsupported" if the text encoder is
            another library's model, "out_of_range" if open_clip rejects the values.
    """
    import open_clip

    config: Any = (
        {"embed_dim": 512, "text_cfg": {}}
        if name == OPEN_CLIP_CUSTOM
        else open_clip.get_model_config(name)
    )
    if config is None:
        near = difflib.get_close_matches(name, open_clip.list_models(), n=3)
        message = f"unknown open_clip model {name!r}: did you mean {', '.join(near) or 'another'}?"
        raise ConfigError(message, "unknown_name", field="name")
    known = [field.name for field in dataclasses.fields(open_clip.CLIPTextCfg)]
    fields = {_SIZES.get(key, key): value for key, value in arguments.items()}
    embed_dim = int(fields.pop("embed_dim", config["embed_dim"]))
    tower = config["text_cfg"] | fields
    check_fields(f"open_clip:{name}", tower, known)
    if tower.get("hf_model_name") or tower.get("embed_cls"):
        message = (
            f"the text encoder of {name} is not an open_clip Transformer: use a preset or hf:TYPE"
        )
        raise ConfigError(message, "unsupported")
    smallest = {"layers": 1, "width": 64, "patch_size": 32, "image_size": 32}
    # open_clip's public interface builds whole models only, so the image encoder is as small as
    # possible
    try:
        net: Any = open_clip.CustomTextCLIP(
            embed_dim, smallest, tower, quick_gelu=bool(config.get("quick_gelu"))
        ).text
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"cannot build text of {name} with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    head = _take_projection(net) if projection else None
    net.text_projection = None
    return TextBackbone(
        net=net,
        adapter=ClipAdapter(net),
        width=net.width,
        vocab_size=net.vocab_size,
        pad_id=net.pad_id,
        max_tokens=net.context_length,
        num_layers=len(net.transformer.resblocks),
        block_prefix="transformer.resblocks.",
        projection=head,
        projected_width=embed_dim,
    )


def uses_clip_tokenizer(name: str) -> bool:
    """Return whether an open_clip model uses CLIP's tokenizer, that is, names no other."""
    fields = _text_fields(name)
    return fields is not None and not fields.get("hf_tokenizer_name")


def uses_canonical_text(name: str) -> bool:
    """Return whether an open_clip model was trained on lower-case texts without punctuation
    (SigLIP).
    """
    options = (_text_fields(name) or {}).get("tokenizer_kwargs") or {}
    return options.get("clean") == "canonicalize"


def _text_fields(name: str) -> Any:
    import open_clip

    return (open_clip.get_model_config(name) or {}).get("text_cfg")


def build_static(vocab_size: int, pad_id: int, arguments: Mapping[str, Any]) -> TextBackbone:
    """Build a table of word vectors. Raises ConfigError: "unknown_name" for an argument other
    than `dimension`.
    """
    check_fields("static", arguments, ["dimension"])
    dimension = int(arguments["dimension"])
    return TextBackbone(
        net=nn.Embedding(vocab_size, dimension),
        adapter=StaticAdapter(),
        width=dimension,
        vocab_size=vocab_size,
        pad_id=pad_id,
        max_tokens=UNBOUNDED,
        num_layers=0,
    )


def _take_projection(net: Any) -> nn.Module | None:
    head = net.text_projection
    return MatrixHead(head) if isinstance(head, nn.Parameter) else head


# Readers of word vector files: GloVe text, word2vec text (with a header line) and word2vec
# binary.
#
# Dimension, number of words, and the length of a word and of a line are limited, so that a
# damaged file cannot exhaust memory.

_MAX_DIMENSION = 4096
_MAX_WORDS = 20_000_000
_MAX_WORD_BYTES = 4096
_MAX_LINE_BYTES = 64 * _MAX_DIMENSION


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """Format of a file."""

    dimension: int
    words: int | None
    """Number of words from the header; None without a header."""
    binary: bool


def read_dimension(path: Path) -> int:
    """Return the dimension of the vectors in a file.

    Raises:
        WeightsError: "unreadable", or "malformed" if it is not a file of word vectors.
    """
    with _open(path) as file:
        return _read_format(file, path).dimension


def fill_word_vectors(table: torch.Tensor, path: Path, vocabulary: Mapping[str, int]) -> int:
    """Copy the vectors of the words in `vocabulary` (word -> row) into `table` (V, D); return how
    many.

    Rows of words that are not in the file become zero: a text's mean has the direction of that over
    the words it has.

    Raises:
        WeightsError: "unreadable", "malformed" or "truncated" if the file cannot be read,
            "mismatch" if its vectors do not have the width of the table.
    """
    filled: set[int] = set()
    with _open(path) as file, torch.no_grad():
        file_format = _read_format(file, path)
        if file_format.dimension != table.shape[1]:
            got = f"expected vectors of dimension {table.shape[1]}, got {file_format.dimension}"
            raise WeightsError(f"{path}: {got}", "mismatch")
        table.zero_()
        for word, vector in (
            _read_binary(file, file_format, path)
            if file_format.binary
            else _read_text(file, file_format, path)
        ):
            row = vocabulary.get(word)
            if row is not None and row not in filled:
                if not np.isfinite(vector).all():
                    raise WeightsError(
                        f"{path}: a vector has a number that is not finite", "malformed"
                    )
                table[row] = torch.from_numpy(vector)
                filled.add(row)
    return len(filled)


def _open(path: Path) -> BinaryIO:
    try:
        return ANYWHERE.open(path, WeightsError)
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist: give a file of word vectors", "unreadable"
        ) from None


def _read_format(file: BinaryIO, path: Path) -> _Format:
    """Detect the format and set the file's position to the first word."""
    fields = _read_line(file, path).split()
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        words = int(fields[0])
        dimension = int(fields[1])
        start = file.tell()
        beginning = file.read(_MAX_WORD_BYTES)
        file.seek(start)
        after_word = beginning.partition(b" ")[2][: 4 * min(dimension, 64)]
        binary = any(byte not in b"0123456789+-.eE \t\r\nnaif" for byte in after_word)
    else:
        words = None
        dimension = len(fields) - 1
        binary = False
        file.seek(0)
    if not 1 <= dimension <= _MAX_DIMENSION or (words is not None and words > _MAX_WORDS):
        raise WeightsError(
            f"{path} has no word vectors: its first line implies {dimension} dimensions",
            "malformed",
        )
    return _Format(dimension=dimension, words=words, binary=binary)


def _read_line(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(_MAX_LINE_BYTES)
    if len(line) == _MAX_LINE_BYTES:
        raise WeightsError(
            f"{path} has no word vectors: a line exceeds {_MAX_LINE_BYTES} bytes", "malformed"
        )
    return line


def _read_text(
    file: BinaryIO, file_format: _Format, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (word, vector). Words may contain spaces (in GloVe's larger files), so numbers are
    counted from the end.
    """
    for number in range(_MAX_WORDS):
        line = _read_line(file, path)
        if not line:
            break
        fields = line.rstrip().split(b" ")
        try:
            vector = np.array(fields[-file_format.dimension :], dtype=np.float32)
        except ValueError:
            vector = np.empty(0, dtype=np.float32)
        if len(fields) <= file_format.dimension or len(vector) != file_format.dimension:
            expected = f"a word and {file_format.dimension} numbers"
            raise WeightsError(f"{path}: expected {expected} in line {number + 1}", "malformed")
        yield b" ".join(fields[: -file_format.dimension]).decode("utf-8", errors="replace"), vector
    if file_format.words is not None and number != file_format.words:
        raise WeightsError(f"{path}: expected {file_format.words} words, got {number}", "truncated")


def _read_binary(
    file: BinaryIO, file_format: _Format, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (word, vector) of a word2vec binary file."""
    for _ in range(file_format.words or 0):
        word = bytearray()
        while (byte := file.read(1)) not in (b" ", b""):
            if byte != b"\n":
                word += byte
            if len(word) > _MAX_WORD_BYTES:
                raise WeightsError(
                    f"{path}: a word has more than {_MAX_WORD_BYTES} bytes", "malformed"
                )
        content = file.read(4 * file_format.dimension)
        if len(content) != 4 * file_format.dimension:
            raise WeightsError(
                f"{path}: expected {file_format.words} words, but the file ends early", "truncated"
            )
        yield word.decode("utf-8", errors="replace"), np.frombuffer(content, dtype="<f4").copy()
