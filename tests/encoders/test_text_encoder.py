"""Text encoders compared with the libraries that they wrap, pooling with plain loops, and word
vector tables.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.tiny_towers import TINY_BERT
from hypothesis import given, settings, strategies as st
from torch import Tensor

from medvl.encoders import create_text_encoder, list_text_encoders
from medvl.errors import ConfigError, WeightsError

TINY_CLIP = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}


def make_encoder(name: str = "bert", **options: Any) -> Any:
    torch.manual_seed(0)
    return create_text_encoder(name, **{**TINY_BERT, **options}).eval()


def batch(
    lengths: tuple[int, ...] = (9, 4, 7), vocab_size: int = 100, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(5, vocab_size, (len(lengths), max(lengths)), generator=generator)
    return ids_BT, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("bert", {}), ("roberta", {}), ("bioalbert", {"embedding_size": 16, "num_hidden_groups": 2})],
)
def test_states_equal_those_of_transformers(name: str, extra: dict[str, Any]) -> None:
    encoder = make_encoder(name, **extra)
    ids_BT, mask_BT = batch()
    ids_BT = ids_BT.masked_fill(~mask_BT, encoder.pad_id)
    expected = encoder.backbone(
        input_ids=ids_BT, attention_mask=mask_BT.long(), output_hidden_states=True
    ).hidden_states
    states = encoder.encode(encoder.embed(ids_BT, mask_BT), mask_BT)
    assert len(states) == len(expected) == encoder.num_layers + 1
    for ours, theirs in zip(states, expected, strict=True):
        if ours.shape == theirs.shape:  # ALBERT's first state is still narrow in transformers
            torch.testing.assert_close(ours[mask_BT], theirs[mask_BT], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("bert", {}), ("roberta", {}), ("bioalbert", {"embedding_size": 16, "num_hidden_groups": 2})],
)
@pytest.mark.parametrize("packed", [False, True])
def test_first_token_attention_equals_that_of_transformers(
    name: str, extra: dict[str, Any], packed: bool
) -> None:
    encoder = make_encoder(name, **extra)
    ids_BT, mask_BT = batch()
    ids_BT = ids_BT.masked_fill(~mask_BT, encoder.pad_id)
    encoder.pack(packed)
    attention_BT = encoder(ids_BT, mask_BT, output_attention=True).attention_BT
    encoder.backbone.set_attn_implementation("eager")
    output = encoder.backbone(
        input_ids=ids_BT, attention_mask=mask_BT.long(), output_attentions=True
    )
    expected_BT = output.attentions[-1][:, :, 0].mean(dim=1)
    torch.testing.assert_close(attention_BT, expected_BT, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(attention_BT.sum(dim=1), torch.ones(3))


def test_first_token_attention_is_computed_on_request_only() -> None:
    encoder = make_encoder()
    ids_BT, mask_BT = batch((9, 0, 7))
    assert encoder(ids_BT, mask_BT).attention_BT is None
    attention_BT = encoder(ids_BT, mask_BT, output_attention=True).attention_BT
    assert (attention_BT[1] == 0).all()
    (attention_BT * torch.rand_like(attention_BT)).sum().backward()
    assert encoder.backbone.encoder.layer[-1].attention.self.key.weight.grad.abs().sum() > 0
    static = create_text_encoder("static", vocab_size=60, dimension=8)
    with raises(ConfigError, "unsupported"):
        static(
            torch.ones(1, 2, dtype=torch.int64),
            torch.ones(1, 2, dtype=torch.bool),
            output_attention=True,
        )


@pytest.mark.parametrize("model_type", ["distilbert", "electra"])
def test_other_transformers_encoders_ignore_padding(model_type: str) -> None:
    sizes = {"vocab_size": 100, "max_position_embeddings": 24}
    if model_type == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    else:
        sizes |= {
            "embedding_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    torch.manual_seed(0)
    encoder = create_text_encoder(f"hf:{model_type}", **sizes).eval()
    ids_BT, mask_BT = batch()
    features = encoder(ids_BT, mask_BT)
    wider = encoder(
        torch.cat([ids_BT, ids_BT], dim=1), torch.cat([mask_BT, torch.zeros_like(mask_BT)], dim=1)
    )
    torch.testing.assert_close(wider.tokens_BTD[:, :9], features.tokens_BTD, rtol=1e-4, atol=1e-5)
    assert len(encoder.parameter_layers()) == 1 + 2
    with raises(ConfigError, "unsupported"):
        encoder.encode(features.tokens_BTD, mask_BT)


def test_clip_text_matches_open_clip() -> None:
    """Short padded texts give the vectors of open_clip, which accepts texts of full length only."""
    import open_clip

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "width": 64, "heads": 1, "layers": 2, "context_length": 77}
    vision = {"layers": 1, "width": 64, "patch_size": 32, "image_size": 32}
    reference = open_clip.CustomTextCLIP(512, vision, sizes, quick_gelu=True).eval()
    ids_BT, mask_BT = batch((9, 4, 7), vocab_size=99)
    last = mask_BT.sum(dim=1) - 1
    ids_BT[torch.arange(3), last] = 99  # the end token has the greatest id
    full = torch.zeros(3, 77, dtype=torch.int64)
    full[:, :9] = ids_BT.masked_fill(~mask_BT, 0)
    expected = reference.encode_text(full)
    torch.manual_seed(0)
    encoder = create_text_encoder("clip_text", projection=True, **TINY_CLIP).eval()
    encoder.backbone.load_state_dict(
        {
            key: tensor
            for key, tensor in reference.text.state_dict().items()
            if key != "text_projection"
        },
        strict=True,
    )
    encoder.projection.matrix = reference.text.text_projection
    torch.testing.assert_close(encoder(ids_BT, mask_BT).pooled_BD, expected, rtol=1e-4, atol=1e-5)
    assert (encoder.feature_dim, encoder.token_dim, encoder.max_tokens) == (512, 64, 77)


def test_siglip_text_is_padded_as_in_training() -> None:
    """SigLIP pads every text to 64 tokens and pools the last position."""
    import open_clip

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 100}
    torch.manual_seed(0)
    encoder = create_text_encoder(
        "open_clip:ViT-B-16-SigLIP", pool="eos", projection=True, pad_id=1, **sizes
    ).eval()
    config = open_clip.get_model_config("ViT-B-16-SigLIP")["text_cfg"]
    small = {"layers": 2, "width": 64, "heads": 1, "vocab_size": 100, "hf_tokenizer_name": None}
    vision = {"layers": 1, "width": 64, "patch_size": 32, "image_size": 32}
    reference = open_clip.CustomTextCLIP(768, vision, {**config, **small}).eval().text
    state = encoder.backbone.state_dict()
    state |= {
        f"text_projection.{key}": tensor for key, tensor in encoder.projection.state_dict().items()
    }
    reference.load_state_dict(state, strict=True)
    ids_BT, mask_BT = batch()
    full = torch.full((3, 64), 1)
    full[:, :9] = ids_BT.masked_fill(~mask_BT, 1)
    torch.testing.assert_close(
        encoder(ids_BT, mask_BT).pooled_BD, reference(full), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("layers", "reduce"),
    [((-1,), "mean"), ((-4, -3, -2, -1), "sum"), ((1, 2, -1), "mean"), ((0,), "sum")],
)
def test_layers_are_summed_or_averaged(layers: tuple[int, ...], reduce: str) -> None:
    encoder = make_encoder(layers=layers, reduce=reduce)
    ids_BT, mask_BT = batch((9, 9))
    states = encoder.encode(encoder.embed(ids_BT, mask_BT), mask_BT)
    total = sum(states[layer] for layer in layers)
    expected = total if reduce == "sum" else total / len(layers)
    torch.testing.assert_close(encoder(ids_BT, mask_BT).tokens_BTD, expected)


@given(
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    pool=st.sampled_from(["cls", "mean", "max", "eos"]),
)
@settings(max_examples=40, deadline=None)
def test_pooling_equals_plain_loops(lengths: list[int], pool: str) -> None:
    encoder = make_encoder(pool=pool, num_hidden_layers=1)
    width = max(1, *lengths)
    mask_BT = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids_BT = torch.randint(5, 100, mask_BT.shape, generator=torch.Generator().manual_seed(0))
    features = encoder(ids_BT, mask_BT)
    for row, length in enumerate(lengths):
        real = features.tokens_BTD[row, :length]
        if length == 0:
            expected = torch.zeros(32)
        else:
            expected = {
                "cls": real[0],
                "mean": real.mean(dim=0),
                "max": real.max(dim=0).values,
                "eos": real[-1],
            }[pool]
        torch.testing.assert_close(features.pooled_BD[row], expected, rtol=1e-5, atol=1e-6)
        assert (features.tokens_BTD[row, length:] == 0).all()


def test_max_pool_of_negative_values_is_negative() -> None:
    """Zeros behind the mask are not pooled."""
    encoder = make_encoder(pool="max")
    with torch.no_grad():
        last = encoder.backbone.encoder.layer[-1].output.LayerNorm
        last.weight.fill_(0.01)
        last.bias.fill_(-5.0)
    ids_BT, mask_BT = batch()
    assert (encoder(ids_BT, mask_BT).pooled_BD < -4).all()


def test_empty_text_is_zero_and_does_not_change_others() -> None:
    encoder = make_encoder(pool="mean")
    ids_BT, mask_BT = batch((9, 0, 7))
    features = encoder(ids_BT, mask_BT)
    assert (features.pooled_BD[1] == 0).all()
    alone = encoder(ids_BT[[0, 2]], mask_BT[[0, 2]])
    torch.testing.assert_close(features.pooled_BD[[0, 2]], alone.pooled_BD, rtol=1e-4, atol=1e-5)
    features.pooled_BD.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in encoder.parameters())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_text_longer_than_max_tokens_raises(name: str) -> None:
    encoder = make_encoder(name)
    assert encoder.max_tokens == {"bert": 24, "roberta": 22}[name]
    ids_BT, mask_BT = batch((encoder.max_tokens,))
    assert torch.isfinite(encoder(ids_BT, mask_BT).pooled_BD).all()
    with raises(ConfigError, "too_large", "max_tokens"):
        encoder(*batch((encoder.max_tokens + 1,)))


def test_shapes_of_ids_and_mask_must_match() -> None:
    encoder = make_encoder()
    ids_BT, mask_BT = batch()
    with raises(ConfigError, "mismatch"):
        encoder(ids_BT, mask_BT[:, :8])
    numbers = encoder(ids_BT, mask_BT.long())
    torch.testing.assert_close(numbers.pooled_BD, encoder(ids_BT, mask_BT).pooled_BD)


def test_encode_accepts_image_tokens_and_square_masks() -> None:
    """Encode as single-stream models do: image tokens before the embeddings, with any mask."""
    encoder = make_encoder()
    ids_BT, mask_BT = batch((5, 3))
    regions_BPD = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    text_BTD = encoder.embed(ids_BT, mask_BT, token_type_ids=torch.ones_like(ids_BT))
    joined = torch.cat([regions_BPD, text_BTD], dim=1)
    allowed = torch.cat([torch.ones(2, 4, dtype=torch.bool), mask_BT], dim=1)
    both = encoder.encode(joined, allowed)[-1]
    assert both.shape == (2, 9, 32)
    square = allowed[:, None, :].expand(-1, 9, -1).clone()
    torch.testing.assert_close(
        encoder.encode(joined, square)[-1][allowed], both[allowed], rtol=1e-5, atol=1e-6
    )
    square[:, :4, 4:] = False  # image rows no longer attend to the text
    apart = encoder.encode(joined, square)[-1]
    only_image = encoder.encode(regions_BPD, torch.ones(2, 4, dtype=torch.bool))[-1]
    torch.testing.assert_close(apart[:, :4], only_image, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(apart[:, 4:][mask_BT], both[:, 4:][mask_BT], atol=1e-4)


def test_causal_mask_hides_the_future() -> None:
    encoder = make_encoder()
    ids_BT, mask_BT = batch((6, 6))
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, -1, -1)
    state = encoder.encode(encoder.embed(ids_BT, mask_BT), causal)[-1]
    changed = ids_BT.clone()
    changed[:, 4:] = 7
    other = encoder.encode(encoder.embed(changed, mask_BT), causal)[-1]
    torch.testing.assert_close(other[:, :4], state[:, :4], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(other[:, 4:], state[:, 4:], atol=1e-3)


def test_projection_heads_have_the_published_widths() -> None:
    small = {key: value for key, value in TINY_BERT.items() if key != "hidden_size"}
    for name, width in (("cxrbert", 128), ("biomedclip_text", 512)):
        encoder = make_encoder(name, projection=True, **small)
        features = encoder(*batch())
        assert features.pooled_BD.shape == (3, width) == (3, encoder.feature_dim)
        assert features.tokens_BTD.shape[2] == encoder.token_dim == 32
    head = make_encoder("cxrbert", projection=True).projection
    text_BD = torch.randn(2, 32)
    hidden = torch.nn.functional.gelu(
        text_BD @ head.dense_to_hidden.weight.T + head.dense_to_hidden.bias
    )
    normed = (hidden - hidden.mean(1, keepdim=True)) / (
        hidden.var(1, unbiased=False, keepdim=True) + 1e-12
    ).sqrt()
    expected = normed @ head.dense_to_output.weight.T + head.dense_to_output.bias
    torch.testing.assert_close(head(text_BD), expected, rtol=1e-4, atol=1e-5)


def test_hugging_face_folder_is_loaded(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(**TINY_BERT, hidden_act="relu")
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    ids_BT, mask_BT = batch()
    encoder = create_text_encoder(tmp_path, pretrained=True).eval()
    expected = model.bert(input_ids=ids_BT, attention_mask=mask_BT.long()).last_hidden_state
    torch.testing.assert_close(
        encoder(ids_BT, mask_BT).tokens_BTD[mask_BT], expected[mask_BT], rtol=1e-4, atol=1e-5
    )
    again = create_text_encoder(
        **json.loads(json.dumps(encoder.config))
    )  # works without the folder
    assert str(tmp_path) not in json.dumps(encoder.config)
    again.load_state_dict(encoder.state_dict(), strict=True)
    half = create_text_encoder(tmp_path, pretrained=True, num_hidden_layers=2)
    assert half.num_layers == 2
    assert torch.equal(
        half.backbone.encoder.layer[1].output.dense.weight,
        model.bert.encoder.layer[1].output.dense.weight,
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "not_found"),
        ("{", "malformed"),
        ("{}", "malformed"),
        ('{"model_type": "custom", "auto_map": {"AutoModel": "evil.Model"}}', "malformed"),
        ("[1]", "malformed"),
    ],
)
def test_folder_without_a_valid_config_raises(
    tmp_path: Path, content: str | None, code: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with raises(ConfigError, code, "name", names=str(tmp_path)):
        create_text_encoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "code", "field"),
    [
        ("bioclinicalbrt", {}, "unknown_name", "name"),
        ("nonsense", {}, "unknown_name", "name"),
        ("hf:nothing", {}, "unknown_name", "name"),
        ("bert", {"num_hidden_layer": 2}, "unknown_name", "num_hidden_layer"),
        ("bert", {"hidden_size": 33}, "out_of_range", None),
        ("bert", {"layers": ()}, "out_of_range", "layers"),
        ("bert", {"layers": (13,), "num_hidden_layers": 2}, "out_of_range", "layers"),
        ("bert", {"pool": "first"}, "unknown_name", "pool"),
        ("bert", {"reduce": "max"}, "unknown_name", "reduce"),
        ("bert", {"vocab_size": 0}, "out_of_range", "vocab_size"),
        ("bert", {"projection": True}, "unsupported", "projection"),
        ("bert", {"vocabulary": {"a": 1}}, "conflict", "vocabulary"),
        ("open_clip:ViT-B-33", {}, "unknown_name", "name"),
        ("open_clip:coca_ViT-B-32", {}, "unsupported", None),
        ("open_clip:roberta-ViT-B-32", {}, "unsupported", None),
        ("clip_text", {"depth": 3}, "unknown_name", "depth"),
        ("static", {}, "missing", None),
        (
            "static",
            {"vocab_size": 5, "dimension": 4, "hidden_size": 4},
            "unknown_name",
            "hidden_size",
        ),
        (
            "static",
            {"vocab_size": 5, "dimension": 4, "projection": True},
            "unsupported",
            "projection",
        ),
    ],
)
def test_invalid_settings_raise(
    name: str, options: dict[str, Any], code: str, field: str | None
) -> None:
    with raises(ConfigError, code, field):
        create_text_encoder(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "suggestion"),
    [
        ("bioclinicalbrt", {}, "bioclinicalbert"),
        ("nonsense", {}, "hf:TYPE"),
        ("bert", {"num_hidden_layer": 2}, "num_hidden_layers"),
        ("open_clip:ViT-B-33", {}, "ViT-B-32"),
    ],
)
def test_unknown_name_suggests_the_nearest_ones(
    name: str, options: dict[str, Any], suggestion: str
) -> None:
    with raises(ConfigError, "unknown_name", names=suggestion):
        create_text_encoder(name, **options)


def test_presets_are_listed() -> None:
    assert list_text_encoders("bio*") == [
        "bioalbert",
        "biobert",
        "bioclinicalbert",
        "biolinkbert",
        "biomedclip_text",
    ]


VOCABULARY = {"[PAD]": 0, "effusion": 1, "left": 2, "heart size": 3, "unknown": 4}
VECTORS = {
    "left": [1.0, 2.0, 3.0],
    "effusion": [4.0, 5.0, 6.5],
    "heart size": [-1.0, 0.0, 1.0],
    "other": [9.0, 9.0, 9.0],
}


def glove(path: Path, header: bool = False) -> Path:
    lines = [f"{word} {' '.join(map(str, vector))}" for word, vector in VECTORS.items()]
    path.write_text("\n".join([*(["4 3"] if header else []), *lines]) + "\n", encoding="utf-8")
    return path


def word2vec(path: Path) -> Path:
    """Write word2vec's binary form, whose words contain no spaces."""
    words = {word.replace(" ", "_"): vector for word, vector in VECTORS.items()}
    rows = [
        word.encode() + b" " + struct.pack("<3f", *vector) + b"\n" for word, vector in words.items()
    ]
    path.write_bytes(b"4 3\n" + b"".join(rows))
    return path


@pytest.mark.parametrize("form", ["glove", "word2vec text", "word2vec binary"])
def test_static_table_is_filled_from_a_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / "vectors.bin"
    path = (
        word2vec(path) if form == "word2vec binary" else glove(path, header=form == "word2vec text")
    )
    vocabulary = {
        ("heart_size" if form == "word2vec binary" and row == 3 else word): row
        for word, row in VOCABULARY.items()
    }
    encoder = create_text_encoder("static", pretrained=path, vocabulary=vocabulary, pool="mean")
    assert (encoder.vocab_size, encoder.token_dim, encoder.num_layers) == (5, 3, 0)
    features = encoder(torch.tensor([[2, 1, 3, 0]]), torch.tensor([[True, True, True, False]]))
    assert features.tokens_BTD[0].tolist() == [
        *(VECTORS[word] for word in ("left", "effusion", "heart size")),
        [0.0] * 3,
    ]
    torch.testing.assert_close(features.pooled_BD[0], torch.tensor([4 / 3, 7 / 3, 10.5 / 3]))
    unknown = [row for word, row in vocabulary.items() if word not in VECTORS and row != 3]
    assert len(unknown) == 2  # words and pieces that the file lacks do not turn a text's vector
    assert not encoder(torch.tensor([unknown]), torch.tensor([[True] * 2])).tokens_BTD.any()
    again = create_text_encoder(**json.loads(json.dumps(encoder.config)))
    again.load_state_dict(encoder.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "malformed"),
        (b"left 1.0 2.0\neffusion 1.0\n", "malformed"),
        (b"left 1.0 x\n", "malformed"),
        (b"left nan 1.0\n", "malformed"),
        (b"3 2\nleft 1.0 2.0\n", "truncated"),
        (b"2 3\nleft " + struct.pack("<3f", 1, 2, 3) + b"\nwo", "truncated"),
        (b"99999999999 300\nleft 1\n", "malformed"),
        (b"word " + b"1.0 " * 5000 + b"\n", "malformed"),
        (b"word " + b"1" * 300_000, "malformed"),
    ],
)
def test_damaged_word_vector_file_raises(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with raises(WeightsError, code, names="vectors.txt"):
        create_text_encoder("static", pretrained=path, vocabulary=VOCABULARY)


def test_word_vector_file_needs_a_vocabulary(tmp_path: Path) -> None:
    with raises(ConfigError, "missing", "vocabulary"):
        create_text_encoder("static", pretrained=glove(tmp_path / "vectors.txt"), vocab_size=5)


def test_encoder_compiles_to_one_graph() -> None:
    encoder = make_encoder(pool="max")
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    ids_BT, mask_BT = batch()
    torch.testing.assert_close(
        compiled(ids_BT, mask_BT).pooled_BD, encoder(ids_BT, mask_BT).pooled_BD
    )
