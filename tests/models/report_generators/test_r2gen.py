"""R2Gen against its layers written out plainly, its cache against none, missing views, and
targets.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch, shaken, tiny_model, tiny_tokenizer
from helpers.learning import fit
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.errors import ConfigError
from medvl.models import R2Gen, R2GenConfig, save
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch
from medvl.train import OptimConfig
from medvl.train.optim.optimizer import build_optimizer

TINY: dict[str, Any] = {
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 1},
    "image_size": 64,
    "width": 16,
    "layers": 2,
    "heads": 2,
    "intermediate": 24,
    "memory_heads": 4,
    "max_tokens": 20,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_words(TEXTS, min_frequency=1)


def generator(tokenizer: Tokenizer | None, **settings: Any) -> R2Gen:
    torch.manual_seed(0)
    model = medvl.create_model("r2gen", tokenizer=tokenizer, **{**TINY, **settings})
    assert isinstance(model, R2Gen)
    return model


def two_views(
    tokenizer: Tokenizer, size: int = 4, has_other: Tensor | None = None, **fields: Any
) -> Batch:
    batch = make_batch(tokenizer, size, **fields)
    return dataclasses.replace(
        batch,
        other_views_BVCHW=batch.image_BCHW.flip(0).flip(3)[:, None],
        has_other_view_BV=None if has_other is None else has_other[:, None],
    )


def naive_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + bias


def naive_attention(
    state: dict[str, Tensor], name: str, heads: int, query: Tensor, other: Tensor
) -> Tensor:
    """One query vector over some vectors, head by head."""
    q, k, v = (F.linear(x, state[f"{name}.{part}.weight"], state[f"{name}.{part}.bias"])
               for part, x in (("query", query), ("key", other), ("value", other)))  # fmt: skip
    answers = []
    for one, keys, values in zip(
        q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True
    ):
        answers.append((one @ keys.T / math.sqrt(one.shape[-1])).softmax(-1) @ values)
    return F.linear(torch.cat(answers, -1), state[f"{name}.out.weight"], state[f"{name}.out.bias"])


def naive_scores(model: R2Gen, cells: Tensor, ids: list[int]) -> Tensor:
    """(T, V): scores after each word of one text: equations 4 to 13 of the paper, no cache."""
    state, config = dict(model.named_parameters()), model.config

    def dense(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def feed_forward(x: Tensor, name: str) -> Tensor:
        return dense(dense(x, f"{name}.0").relu(), f"{name}.3")

    x = cells
    for layer in range(config.layers):
        name = f"image_layers.layers.{layer}"
        normed = naive_norm(x, state[f"{name}.norms.0.weight"], state[f"{name}.norms.0.bias"])
        x = x + naive_attention(state, f"{name}.attention", config.heads, normed, normed)
        normed = naive_norm(x, state[f"{name}.norms.1.weight"], state[f"{name}.norms.1.bias"])
        x = x + feed_forward(normed, f"{name}.feed_forward")
    cells = naive_norm(x, state["image_layers.norm.weight"], state["image_layers.norm.bias"])

    width = config.width
    words = []
    for place, number in enumerate(ids):
        angle = torch.tensor([place / 10000 ** (2 * (i // 2) / width) for i in range(width)])
        sine = torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos())
        words.append(
            state["decoder.words.weight"][number] * math.sqrt(width) + sine.to(cells.dtype)
        )
    memory = torch.zeros(config.slots, width, dtype=cells.dtype)
    memory[range(config.slots), range(config.slots)] = 1
    memories = []
    for word in words:
        seen = torch.cat([memory, word[None]])
        new = memory + naive_attention(
            state, "decoder.memory.attention", config.memory_heads, memory, seen
        )
        new = new + dense(dense(new, "decoder.memory.mlp.0").relu(), "decoder.memory.mlp.2").relu()
        gates = dense(word, "decoder.memory.token_gates") + dense(
            memory.tanh(), "decoder.memory.memory_gates"
        )
        memory = gates[:, :width].sigmoid() * new.tanh() + gates[:, width:].sigmoid() * memory
        memories.append(memory.flatten())

    def conditional(x: Tensor, name: str) -> Tensor:
        m = torch.stack(memories)
        change = [
            dense(dense(m, f"{name}.{part}.0").relu(), f"{name}.{part}.2")
            for part in ("weight_change", "bias_change")
        ]
        return naive_norm(x, state[f"{name}.weight"] + change[0], state[f"{name}.bias"] + change[1])

    x = torch.stack(words)
    for layer in range(config.layers):
        name = f"decoder.layers.{layer}"
        normed = conditional(x, f"{name}.norms.0")
        x = x + torch.stack([
            naive_attention(state, f"{name}.attention", config.heads, normed[t],
            normed[: t + 1]) for t in range(len(ids))
        ])  # fmt: skip
        normed = conditional(x, f"{name}.norms.1")
        x = x + naive_attention(state, f"{name}.cross_attention", config.heads, normed, cells)
        x = x + feed_forward(conditional(x, f"{name}.norms.2"), f"{name}.feed_forward")
    return dense(
        naive_norm(x, state["decoder.norm.weight"], state["decoder.norm.bias"]), "word_head"
    )


def cells_of(model: R2Gen, *images: Tensor) -> Tensor:
    """The cells of the views of one study, before the encoder."""
    return torch.cat(
        [
            model.image_input(model.image_encoder(image[None]).patches_BPD)[0].relu()
            for image in images
        ]
    )


def test_loss_and_gradient_equal_the_formula_under_masks(tokenizer: Tokenizer) -> None:
    """Padding, a missing view, and samples without an image or text change nothing."""
    model = shaken(generator(tokenizer)).eval()
    batch = two_views(tokenizer, 5, flags(1, 0, 1, 1, 1))
    batch = dataclasses.replace(
        batch, has_image_B=flags(1, 1, 1, 0, 1), has_text_B=flags(1, 1, 1, 1, 0)
    )
    model(batch).total.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    terms = []
    for row in range(3):
        ids = batch.ids_BT[row][batch.mask_BT[row]].tolist()
        views = [batch.image_BCHW[row], *(batch.other_views_BVCHW[row] if row != 1 else [])]
        cells = cells_of(model, *views)
        log_TV = naive_scores(model, cells, ids[:-1]).log_softmax(-1)
        terms += [-log_TV[place, number] for place, number in enumerate(ids[1:])]
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(model(batch).total, expected, rtol=1e-4, atol=1e-5)
    expected.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("key.bias"):  # it cancels in the softmax: rounding errors only
            continue
        scale = gradient[name].abs().max().clamp(min=1e-3)
        torch.testing.assert_close(
            parameter.grad / scale, gradient[name] / scale, rtol=0, atol=2e-3, msg=name
        )
    assert set(model(batch).terms) == {"words"}


class WithoutCache:
    """The same model as a `NextToken` that computes all words again at every step, as the
    released loop.
    """

    def __init__(self, model: R2Gen, image: Tokens) -> None:
        self.model, self.image = model, image
        self.ids_RT = torch.zeros(len(image.states_BND), 1, dtype=torch.int64)

    def first(self) -> Tensor:
        return self.model.score_next(self.ids_RT, self.image)[:, -1]

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.image = self.image.rows(parent_R)
        self.ids_RT = torch.cat([self.ids_RT[parent_R], ids_R[:, None]], dim=1)
        return self.first()


def test_step_from_the_cache_equals_the_full_pass(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).double().eval()
    ids_BT = torch.randint(0, tokenizer.vocab_size, (3, 9))
    image = Tokens(torch.randn(3, 5, 16, dtype=torch.float64), flags(1, 1, 1, 1, 0).expand(3, -1))
    full_BTV = model.score_next(ids_BT, image)
    state = model.decoder.read(image)
    for place in range(9):
        states, state = model.decoder(ids_BT[:, place : place + 1], state)
        torch.testing.assert_close(
            model.word_head(states[:, 0]), full_BTV[:, place], rtol=1e-9, atol=1e-9
        )
    states, state = model.decoder(ids_BT[:, :4], model.decoder.read(image))
    states, _ = model.decoder(ids_BT[:, 4:], state)  # several tokens after several others
    torch.testing.assert_close(model.word_head(states), full_BTV[:, 4:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "decoding",
    [Decoding(), Decoding(beams=3), Decoding(beams=3, block_ngrams=3), Decoding(samples=4)],
)
def test_decoding_from_the_cache_writes_the_same(decoding: Decoding, tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = two_views(tokenizer, 4, flags(1, 0, 1, 1))
    with torch.no_grad():
        model.word_head.bias[tokenizer.sep_id] -= 1.0
        image = model.read(batch)
        expected = search(
            WithoutCache(model, image),
            decoding,
            max_tokens=12,
            end_id=0,
            pad_id=0,
            never=[tokenizer.unk_id],
        )
    generated = model.write_reports(batch, decoding=dataclasses.replace(decoding, max_tokens=12))
    assert torch.equal(generated.ids_BT, expected.ids_BT)
    torch.testing.assert_close(generated.score_B, expected.score_B, rtol=1e-4, atol=1e-3)
    assert generated.mask_BT.sum() > 10
    assert len({tuple(row.tolist()) for row in generated.ids_BT}) > 1
    assert not (generated.ids_BT[generated.mask_BT] == tokenizer.unk_id).any()


def test_missing_views_are_not_looked_at(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = two_views(tokenizer, 3, flags(1, 0, 0))
    changed = batch.other_views_BVCHW.clone()
    changed[1:] = 255
    both = model(batch).total
    assert torch.equal(model(dataclasses.replace(batch, other_views_BVCHW=changed)).total, both)
    changed[0] = 255
    assert not torch.equal(model(dataclasses.replace(batch, other_views_BVCHW=changed)).total, both)
    none = dataclasses.replace(batch, has_other_view_BV=flags(0, 0, 0)[:, None])
    single = dataclasses.replace(batch, other_views_BVCHW=None, has_other_view_BV=None)
    torch.testing.assert_close(model(none).total, model(single).total)
    assert generator(tokenizer, views=1).inputs.other_views == 0
    assert model.inputs.other_views == 1


def test_cut_texts_do_not_teach_to_stop(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer, max_tokens=8)).eval()
    batch = two_views(train_words(TEXTS, min_frequency=1, max_tokens=8), 4)
    target_BT = model._targets(batch.ids_BT, batch.mask_BT)
    length_B = batch.mask_BT.sum(dim=1)
    assert (length_B == 8).any()
    assert (length_B < 8).any()
    for row, length in enumerate(length_B.tolist()):
        ids = batch.ids_BT[row][1:length].tolist()
        kept = ids[:-1] if length == 8 else ids
        assert target_BT[row].tolist() == kept + [-100] * (7 - len(kept))


def test_every_parameter_learns_and_the_first_loss_is_that_of_chance(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer).train()
    result = model(two_views(tokenizer, 6))
    assert float(result.total.detach()) == pytest.approx(math.log(tokenizer.vocab_size), abs=0.6)
    result.total.backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert set(idle) <= {
        name for name in idle if name.endswith("key.bias")
    }  # keys' biases cancel in the softmax
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            model.eval()(two_views(tokenizer, 6)).total, result.total, rtol=0.2, atol=0.2
        )
    model.zero_grad()
    nothing = dataclasses.replace(two_views(tokenizer, 2), has_text_B=flags(0, 0))
    empty = model(nothing).total
    empty.backward()
    assert float(empty.detach()) == 0
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )


@pytest.mark.training
def test_reports_are_learned_from_pixels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = {"layers": 1, "width": 32, "dropout": 0.0, "cell_dropout": 0.0}
    model = generator(
        tokenizer, image_encoder="resnet_tiny", image_arguments={}, **settings
    ).train()
    batch = make_batch(tokenizer, 4)
    image_BCHW = torch.zeros_like(batch.image_BCHW)
    for row, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        image_BCHW[row, :, top : top + 32, left : left + 32] = 255
    batch = dataclasses.replace(batch, image_BCHW=image_BCHW)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    fit(model, batch, optimizer, 40)
    model.eval()
    expected = [tokenizer.decode(ids) for ids in batch.ids_BT]
    save(model, tmp_path)
    for each in (model, medvl.load(tmp_path)):
        for decoding in (Decoding(), Decoding(beams=3, block_ngrams=3)):
            generated = each.write_reports(batch, decoding=decoding)
            texts = [
                tokenizer.decode(ids[mask])
                for ids, mask in zip(generated.ids_BT, generated.mask_BT, strict=True)
            ]
            assert texts == expected
            assert generated.ended_B.all()
    assert "small left effusion ." in texts[0]


def test_the_image_encoder_starts_from_any_system(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With the model's own words, whatever the vocabulary of the other system; all weights from
    its own kind.
    """
    other = tiny_model("dual_stream", tiny_tokenizer(), image_arguments={"depth": 1})
    save(other, tmp_path)
    model = generator(tokenizer, init_from=tmp_path)
    assert model.tokenizer is tokenizer
    assert torch.equal(
        next(model.image_encoder.parameters()), next(other.image_encoder.parameters())
    )
    with raises(ConfigError, "missing", "tokenizer"):
        generator(None, init_from=tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    save(shaken(model), own)
    again = generator(None, init_from=own)
    assert torch.equal(again.word_head.weight, model.word_head.weight)
    assert again.tokenizer is not None


def test_rates_and_errors(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer)
    optimizer = build_optimizer(
        model, OptimConfig(optimizer="adam", lr=1e-4, weight_decay=5e-5, amsgrad=True)
    )
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in model.image_encoder.parameters() if p.requires_grad} == {5e-5}
    assert {
        rates[id(p)]
        for name, p in model.named_parameters()
        if not name.startswith("image_encoder.")
    } == {1e-4}
    with raises(ConfigError, "missing", "tokenizer"):
        medvl.create_model("r2gen", **TINY)
    with raises(ConfigError, "conflict", "width"):
        R2GenConfig(width=20)
    with raises(ConfigError, "out_of_range", "views"):
        R2GenConfig(views=3)
    with raises(ConfigError, "conflict"):
        model.train().write_reports(two_views(tokenizer))
    with raises(ConfigError, "missing", "tokenizer"):
        generator(None, vocab_size=30).eval().write_reports(two_views(tokenizer))
