"""CXRMate: its decoder against Llama of `transformers`, its cache against none, the order and
padding of images, sections, and prompts.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch, shaken
from helpers.learning import fit
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.errors import ConfigError
from medvl.models import CXRMate, CXRMateConfig, save
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.report_generators.parts.prefix import PrefixDecoder, insert_images
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch

TINY: dict[str, Any] = {
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 1},
    "image_size": 64,
    "width": 16,
    "layers": 2,
    "heads": 2,
    "intermediate": 24,
    "max_tokens": 20,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_words(TEXTS, min_frequency=1)


HAS_VIEWS = flags(1, 1, 0, 0, 1, 0, 0, 0).view(4, 2)


def generator(tokenizer: Tokenizer | None, **settings: Any) -> CXRMate:
    torch.manual_seed(0)
    model = medvl.create_model("cxrmate", tokenizer=tokenizer, **{**TINY, **settings})
    assert isinstance(model, CXRMate)
    return model


def study(tokenizer: Tokenizer, size: int = 4, **fields: Any) -> Batch:
    """Three views of a study, and two sections."""
    batch = make_batch(tokenizer, size)
    return dataclasses.replace(
        batch,
        **{
            "other_views_BVCHW": torch.stack(
                [batch.image_BCHW.flip(0).flip(3), batch.image_BCHW.roll(1, 0)], dim=1
            ),
            "second_ids_BT": batch.ids_BT.flip(0),
            "second_mask_BT": batch.mask_BT.flip(0),
            **fields,
        },
    )


def with_prompt(model: CXRMate, batch: Batch, padding: int = 0) -> Batch:
    """Add a prompt of a heading, three words and the image's marker; one row is shorter."""
    heading, marker = model.word_id("indication"), model.word_id("image")
    rows = [[heading, 5, 6, 7, marker], [heading, 8, marker], *[[marker]] * (len(batch) - 2)]
    length = max(map(len, rows)) + padding
    ids_BT = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask_BT = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
    return dataclasses.replace(batch, prompt_ids_BT=ids_BT, prompt_mask_BT=mask_BT)


def test_the_decoder_is_llama() -> None:
    """Over a prefix alone that sees itself causally, that is without one, it is `transformers`' own."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = Sizes(width=32, layers=2, heads=4, intermediate=48)
    ours = PrefixDecoder(sizes).eval()
    config = LlamaConfig(
        vocab_size=11, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    theirs = LlamaModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    state = theirs.state_dict()
    state.pop("embed_tokens.weight")
    ours.load_state_dict(state)
    text_BTD = torch.randn(3, 7, 32)
    nothing = Tokens(torch.zeros(3, 0, 32), None)
    expected = theirs(inputs_embeds=text_BTD).last_hidden_state
    torch.testing.assert_close(ours(nothing, text_BTD), expected, rtol=1e-4, atol=1e-5)
    # A prefix of one token is causal too, and padding behind it takes no place.
    prefix = Tokens(
        torch.cat([text_BTD[:, :1], torch.ones(3, 2, 32)], 1), flags(1, 0, 0).expand(3, 3)
    )
    torch.testing.assert_close(ours(prefix, text_BTD[:, 1:]), expected[:, 1:], rtol=1e-4, atol=1e-5)


def test_the_prefix_sees_itself_and_never_the_report() -> None:
    torch.manual_seed(0)
    decoder = PrefixDecoder(Sizes(width=16, layers=2, heads=2, intermediate=24)).double().eval()
    prefix_BPD = torch.randn(2, 4, 16, dtype=torch.float64)
    text_BTD = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    states_BTD = decoder(Tokens(prefix_BPD, None), text_BTD)
    (gradient,) = torch.autograd.grad(states_BTD[:, 1].sum(), text_BTD)
    assert gradient[:, :2].any(dim=-1).all()
    assert not gradient[:, 2:].any()  # causal
    # The last tokens of the prefix change the first token's state: it is not causal.
    real_BP = flags(1, 1, 1, 1).expand(2, 4)
    changed_BPD = prefix_BPD.clone()
    changed_BPD[:, -1] += 1
    one, other = (decoder.read(Tokens(each, real_BP)) for each in (prefix_BPD, changed_BPD))
    assert not torch.allclose(one.keys_values[1][0][:, :, 0], other.keys_values[1][0][:, :, 0])


class WithoutCache:
    """The same model as a `NextToken` that computes all words again at every step."""

    def __init__(self, model: CXRMate, prefix: Tokens) -> None:
        self.model, self.prefix = model, prefix
        self.ids_RT = torch.zeros(len(prefix.states_BND), 1, dtype=torch.int64)

    def first(self) -> Tensor:
        return self.model.score_next(self.ids_RT, self.prefix)[:, -1]

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.prefix = self.prefix.rows(parent_R)
        self.ids_RT = torch.cat([self.ids_RT[parent_R], ids_R[:, None]], dim=1)
        return self.first()


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding(beams=3, block_ngrams=3), Decoding(samples=4)]
)
def test_decoding_from_the_cache_writes_the_same(decoding: Decoding, tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = with_prompt(model, study(tokenizer, has_other_view_BV=HAS_VIEWS))
    decoding = dataclasses.replace(decoding, max_tokens=12)
    with torch.no_grad():
        model.word_head.weight[tokenizer.sep_id] *= 0.1
        generated = model.write_ids(batch, decoding=decoding)
        never = [model.word_id(word) for word in ("image", "prior findings", "prior impression",
                 "indication", "history", "comparison", "technique")]  # fmt: skip
        expected = search(
            WithoutCache(model, model.read(batch)),
            decoding,
            max_tokens=12,
            end_id=0,
            pad_id=0,
            never=[*never, tokenizer.unk_id],
        )
    assert torch.equal(generated.ids_BT, expected.ids_BT)
    torch.testing.assert_close(generated.score_B, expected.score_B, rtol=1e-4, atol=1e-3)
    assert generated.mask_BT.sum() > 10
    assert len({tuple(row.tolist()) for row in generated.ids_BT}) > 1


def test_padding_views_and_other_samples_change_nothing(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = with_prompt(model, study(tokenizer, has_other_view_BV=HAS_VIEWS))
    assert batch.other_views_BVCHW is not None
    scores = model.score_next(batch.ids_BT, model.read(batch))
    changed = batch.other_views_BVCHW.clone()
    changed[~HAS_VIEWS] = 255
    padded = dataclasses.replace(with_prompt(model, batch, padding=3), other_views_BVCHW=changed)
    torch.testing.assert_close(model.score_next(batch.ids_BT, model.read(padded)), scores)
    for row, count in enumerate(HAS_VIEWS.sum(dim=1).tolist()):
        alone = batch.rows([row])
        alone.other_views_BVCHW = batch.other_views_BVCHW[row : row + 1, :count] if count else None
        alone.has_other_view_BV = None
        torch.testing.assert_close(
            model.score_next(alone.ids_BT, model.read(alone))[0], scores[row], rtol=1e-4, atol=1e-5
        )
    without = dataclasses.replace(batch, prompt_ids_BT=None, prompt_mask_BT=None)
    plain = model.score_next(batch.ids_BT, model.read(without))
    torch.testing.assert_close(plain[2:], scores[2:])  # a prompt of the marker alone is none
    assert not torch.allclose(plain[:2], scores[:2])


def test_the_prompt_has_one_marker_where_the_image_goes() -> None:
    prompt = Tokens(torch.arange(8.0).view(2, 4, 1), flags(1, 1, 1, 1, 1, 1, 0, 0).view(2, 4))
    marker_BQ = flags(0, 1, 0, 0, 1, 0, 1, 0).view(2, 4)  # one on padding does not count
    image = Tokens(torch.tensor([[[50.0], [51.0]], [[60.0], [61.0]]]), flags(1, 1, 1, 0).view(2, 2))
    spliced = insert_images(prompt, marker_BQ, image)
    assert spliced.states_BND[0, :, 0].tolist() == [0, 50, 51, 2, 3]
    assert spliced.states_BND[1, :2, 0].tolist() == [60, 5]
    assert spliced.real_BN().sum(dim=1).tolist() == [5, 2]
    left = insert_images(prompt, marker_BQ, image, left=True)
    assert left.states_BND[1, 3:, 0].tolist() == [60, 5]
    assert left.real_BN()[1].tolist() == [False, False, False, True, True]
    for wrong in (flags(0, 0, 0, 0, 1, 0, 0, 0), flags(1, 1, 0, 0, 1, 0, 0, 0)):
        with raises(ConfigError, "mismatch", "prompt_ids_BT"):
            insert_images(prompt, wrong.view(2, 4), image)


def test_both_sections_are_one_text_with_words_for_missing_ones(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer)
    batch = study(tokenizer, has_text_B=flags(1, 0, 1, 0), has_second_text_B=flags(1, 1, 0, 0))
    assert model.trained_rows(batch).tolist() == [0, 1, 2]
    batch = batch.rows([0, 1, 2])
    assert batch.second_ids_BT is not None
    assert batch.second_mask_BT is not None
    ids_BT, target_BT = model.words_and_targets(batch)
    end = tokenizer.sep_id
    for row in range(3):
        findings = batch.ids_BT[row][batch.mask_BT[row]].tolist()[1:-1]
        impression = batch.second_ids_BT[row][batch.second_mask_BT[row]].tolist()[1:-1]
        if row == 1:
            findings = [model.word_id("no findings")]
        if row == 2:
            impression = [model.word_id("no impression")]
        text = [tokenizer.cls_id, *findings, model.word_id("section"), *impression, end]
        assert ids_BT[row, : len(text) - 1].tolist() == text[:-1]
        assert target_BT[row, : len(text) - 1].tolist() == text[1:]
        assert (target_BT[row, len(text) - 1 :] == -100).all()


def test_the_loss_is_the_mean_over_all_words(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = with_prompt(model, study(tokenizer, has_image_B=flags(1, 1, 1, 0)))
    terms = []
    kept = batch.rows([0, 1, 2])
    for row in range(3):
        alone = kept.rows([row])
        ids_BT, target_BT = model.words_and_targets(alone)
        log_TV = model.score_next(ids_BT, model.read(alone))[0].log_softmax(-1)
        terms += [-log_TV[t, number] for t, number in enumerate(target_BT[0].tolist())]
    torch.testing.assert_close(model(batch).total, torch.stack(terms).mean(), rtol=1e-4, atol=1e-5)
    assert float(model.loss_counts(batch)) == len(terms)


def test_a_section_that_may_be_cut_does_not_teach_where_it_ends(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer, max_tokens=8)
    cut = train_words(TEXTS, min_frequency=1, max_tokens=8)
    ids_BT, target_BT = model.words_and_targets(study(cut))
    for ids, target in zip(ids_BT.tolist(), target_BT.tolist(), strict=True):
        place = ids.index(model.word_id("section"))
        ignored = target[place - 1] == -100
        assert ignored == (place == 7)  # a first token and six words


def test_the_type_changes_behind_what_divides_the_sections(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer)).eval()
    batch = study(tokenizer, 1)
    section = model.word_id("section")
    ids_BT = torch.tensor([[0, 4, section, 5]])
    before = model.score_next(ids_BT, model.read(batch))
    with torch.no_grad():
        model.types.weight[1] += 1.0  # of the impression
    after = model.score_next(ids_BT, model.read(batch))
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3], before[:, 3])


def test_every_parameter_learns_and_the_first_loss_is_that_of_chance(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer).train()
    batch = with_prompt(model, study(tokenizer))
    result = model(batch)
    words = tokenizer.vocab_size + 10
    assert float(result.total.detach()) == pytest.approx(math.log(words), abs=0.3)
    result.total.backward()
    idle = [name for name, each in model.named_parameters()
            if each.grad is None or not each.grad.any()]  # fmt: skip
    assert idle == []
    model.zero_grad()
    nothing = dataclasses.replace(
        batch, has_text_B=flags(0, 0, 0, 0), has_second_text_B=flags(0, 0, 0, 0)
    )
    empty = model(nothing).total
    empty.backward()
    assert float(empty.detach()) == 0


def test_stored_features_replace_images(tokenizer: Tokenizer) -> None:
    model = shaken(generator(tokenizer, frozen_image=True)).train()
    batch = study(tokenizer, has_other_view_BV=HAS_VIEWS)
    assert batch.other_views_BVCHW is not None
    first, others = (
        torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
        for features in map(
            model.image_encoder, (batch.image_BCHW, batch.other_views_BVCHW.flatten(0, 1))
        )
    )
    of_features = dataclasses.replace(
        batch,
        image_BCHW=batch.image_BCHW[:, :, :0, :0],
        regions_BPD=first,
        other_views_BVCHW=None,
        other_regions_BVPD=others.unflatten(0, (4, 2)),
    )
    torch.testing.assert_close(model(of_features).total, model(batch).total)
    model(of_features).total.backward()
    assert all(each.grad is None for each in model.image_encoder.parameters())


@pytest.mark.training
def test_reports_are_learned_from_pixels_and_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Findings from the place of a square, the impression from the indication."""
    model = generator(tokenizer, image_encoder="resnet_tiny", image_arguments={}, width=32).train()
    batch = with_prompt(model, study(tokenizer, other_views_BVCHW=None))
    image_BCHW = torch.zeros_like(batch.image_BCHW)
    for row, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        image_BCHW[row, :, top : top + 32, left : left + 32] = 255
    batch = dataclasses.replace(batch, image_BCHW=image_BCHW)
    fit(model, batch, torch.optim.Adam(model.parameters(), lr=3e-3), 60)
    model.eval()
    expected = list(zip(TEXTS, reversed(TEXTS), strict=True))
    save(model, tmp_path)
    for each in (model, medvl.load(tmp_path)):
        written = each.write_sections(batch, decoding=Decoding())
        plain = [tuple(text.replace(" .", ".").lower() for text in pair) for pair in written]
        assert plain == [tuple(text.lower() for text in pair) for pair in expected]
        texts = each.write_reports(batch, decoding=Decoding(beams=2))
        decoded = tokenizer.decode(texts.ids_BT[0][texts.mask_BT[0]])
        assert decoded == " ".join(written[0])


def test_loaders_make_the_prompt_of_the_study_and_its_prior(tokenizer: Tokenizer) -> None:
    model = generator(tokenizer, prior=True, prompt=("indication",))
    prompt = model.inputs.prompt
    assert prompt is not None
    assert prompt.reads_prior
    assert model.inputs.for_writing.prior_image
    marker = model.word_id("image")
    assert list(prompt({"findings": "x"}, None)) == [marker]  # the target is not read
    words = {
        text: tokenizer([text])[0][0].tolist()[1:-1] for text in ("the heart", "no pneumothorax")
    }
    prior = {"findings": "No pneumothorax", "indication": "the heart"}
    assert list(prompt({"indication": "The heart"}, prior)) == [
        model.word_id("prior findings"), *words["no pneumothorax"],
        model.word_id("indication"), *words["the heart"], marker,
    ]  # fmt: skip


def test_errors(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "missing", "tokenizer"):
        medvl.create_model("cxrmate", **TINY)
    with raises(ConfigError, "conflict", "width"):
        CXRMateConfig(width=20)
    with raises(ConfigError, "out_of_range", "views"):
        CXRMateConfig(views=0)
    with raises(ConfigError, "unknown_name", "prompt"):
        CXRMateConfig(prompt=("findings",))
    with raises(ConfigError, "conflict"):
        generator(tokenizer).train().write_sections(study(tokenizer))
