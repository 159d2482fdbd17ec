"""The answer decoder against plain loops: scores of answers, shortlists and written answers."""

import dataclasses
import itertools
import math
from typing import Any, cast

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, TINY, make_batch, shaken, tiny_model
from helpers.learning import fit
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError
from medvl.models import VQA
from medvl.models.downstream.vqa.decoder import DecoderConfig, Head
from medvl.models.downstream.vqa.model import DecoderHead
from medvl.models.fusion_encoders.albef import ALBEF
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch

ANSWERS = (
    "no",
    "left effusion",
    "left",
    "right lower lobe",
    "clear lungs",
    "left lower lobe",
    "enlarged heart",
    "yes",
)
"""Answers of one to three words and more pieces; three have the same first word."""
DECODER = DecoderConfig(layers=2, heads=2, intermediate=64, dropout=0.0, max_tokens=16, beams=1)
SYSTEMS = sorted(TINY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece([*TEXTS, *ANSWERS], vocab_size=90, min_frequency=1)


def decoding_vqa(name: str, tokenizer: Tokenizer, head: Head = "ranking", **changes: Any) -> VQA:
    """Return a model with random weights; initially all answers have nearly equal scores."""
    decoder = dataclasses.replace(DECODER, **changes)
    model = shaken(VQA.on(tiny_model(name, tokenizer), ANSWERS, head=head, decoder=decoder))
    assert isinstance(model, VQA)
    return model.eval()


def decoder_head(model: VQA) -> DecoderHead:
    assert isinstance(model.answer_head, DecoderHead)
    return model.answer_head


def read_CD(model: VQA, fused: Fused, row: int) -> Tensor:
    """Return the states that the decoder reads for one question, without padding."""
    parts = [fused.text] if isinstance(model.fusion_model, ALBEF) else [fused.text, fused.image]
    return torch.cat([part.states_BND[row][part.real_BN()[row]] for part in parts])


def attend(attention: Any, queries_QD: Tensor, keys_KD: Tensor, mask_QK: Tensor) -> Tensor:
    """Attend with one head after the other."""
    projected = attention.query(queries_QD), attention.key(keys_KD), attention.value(keys_KD)
    attended = []
    for query_Qd, key_Kd, value_Kd in zip(
        *(part.chunk(attention.heads, dim=1) for part in projected), strict=True
    ):
        scores_QK = query_Qd @ key_Kd.T / math.sqrt(query_Qd.shape[1])
        attended.append(scores_QK.masked_fill(~mask_QK, -math.inf).softmax(dim=1) @ value_Kd)
    return attention.norm(queries_QD + attention.out(torch.cat(attended, dim=1)))


def next_words(head: DecoderHead, context_CD: Tensor, ids: list[int]) -> Tensor:
    """(T, V): log-probabilities of the word after each of these ids, without a cache."""
    decoder: Any = head.decoder
    ids_T = torch.tensor(ids)
    states_TD = decoder.norm(decoder.words(ids_T) + decoder.positions.weight[: len(ids)])
    earlier_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    everything_TC = torch.ones(len(ids), len(context_CD), dtype=torch.bool)
    for layer in decoder.layers:
        states_TD = attend(layer.attention, states_TD, states_TD, earlier_TT)
        states_TD = attend(layer.cross_attention, states_TD, context_CD, everything_TC)
        states_TD = layer.feed_forward(states_TD)
    return decoder.score_words(states_TD).log_softmax(dim=1)


def naive_words(model: VQA, context_CD: Tensor, answer: str) -> list[Tensor]:
    """Return the log-probability of every word of an answer and of its closing token."""
    assert model.tokenizer is not None
    ids = model.tokenizer([answer])[0][0].tolist()
    log_TV = next_words(decoder_head(model), context_CD, ids[:-1])
    return [log_TV[place, word] for place, word in enumerate(ids[1:])]


def naive_scores(model: VQA, batch: Batch, first_word: str = "once") -> Tensor:
    fused = model.fusion_model.features(batch)
    rows = []
    for row in range(len(batch)):
        words = [naive_words(model, read_CD(model, fused, row), answer) for answer in ANSWERS]
        likelihoods = [torch.stack(log).sum() for log in words]
        if first_word == "twice":  # ALBEF: log p(first word) minus the cross-entropy of the answer
            likelihoods = [
                torch.cat([log[0].exp().log()[None], torch.stack(log)]).sum() for log in words
            ]
        rows.append(torch.stack(likelihoods))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "first_word"), zip(SYSTEMS, itertools.cycle(("once", "twice")), strict=False)
)
def test_score_is_the_log_likelihood_of_the_words(
    name: str, first_word: str, tokenizer: Tokenizer
) -> None:
    model, batch = decoding_vqa(name, tokenizer, first_word=first_word), make_batch(tokenizer, 5)
    with torch.no_grad():
        expected, scores = naive_scores(model, batch, first_word), model.answer_logits(batch)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
    assert expected.std(dim=0).min() > 1e-3, "every question has the same scores: nothing is tested"


def test_first_word_twice_changes_answers(tokenizer: Tokenizer) -> None:
    """The published score does not rank by likelihood."""
    batch = make_batch(tokenizer, 4)
    with torch.no_grad():
        once, twice = (
            decoding_vqa("albef", tokenizer, first_word=how).answer_logits(batch)
            for how in ("once", "twice")
        )
    assert (twice < once).all()
    assert not torch.equal(once.argsort(dim=1), twice.argsort(dim=1))


@pytest.mark.parametrize("shortlist", [1, 3, 7])
def test_shortlist_has_the_likeliest_first_words(shortlist: int, tokenizer: Tokenizer) -> None:
    model, batch = (
        decoding_vqa("dual_stream", tokenizer, shortlist=shortlist),
        make_batch(tokenizer, 5),
    )
    with torch.no_grad():
        scores, expected = model.answer_logits(batch), naive_scores(model, batch)
        fused = model.fusion_model.features(batch)
        for row in range(len(batch)):
            # Rounded, since answers with the same first word are equal, and sorting is stable.
            first_V = [
                round(float(naive_words(model, read_CD(model, fused, row), answer)[0]), 4)
                for answer in ANSWERS
            ]
            ranked = sorted(range(len(ANSWERS)), key=lambda place: -first_V[place])
            assert sorted(scores[row].isfinite().nonzero()[:, 0].tolist()) == sorted(
                ranked[:shortlist]
            )
    finite = scores.isfinite()
    torch.testing.assert_close(scores[finite], expected[finite], rtol=1e-4, atol=1e-3)
    predictions = model.predict(batch)
    assert predictions.answers == [ANSWERS[place] for place in scores.argmax(dim=1).tolist()]
    torch.testing.assert_close(predictions.score_B, scores.amax(dim=1).exp())


def test_chunked_ranking_changes_no_score(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = decoding_vqa("m3ae", tokenizer), make_batch(tokenizer, 5)
    with torch.no_grad():
        expected = model.answer_logits(batch)
        monkeypatch.setattr("medvl.models.downstream.vqa.model._ANSWERS_AT_ONCE", 3)
        monkeypatch.setattr("medvl.models.downstream.vqa.model._WORDS_AT_ONCE", 4)
        torch.testing.assert_close(model.answer_logits(batch), expected, rtol=1e-5, atol=1e-4)


def test_questions_are_encoded_once_for_all_answers(tokenizer: Tokenizer) -> None:
    """ALBEF's code repeats a question's states for each of 128 answers; here all share its keys
    and values.
    """
    model, batch = decoding_vqa("albef", tokenizer), make_batch(tokenizer, 5)
    rows: list[int] = []
    layers: Any = decoder_head(model).decoder.layers
    modules = [model.fusion_model.image_encoder, model.fusion_model.text_encoder]
    for module in [*modules, *(layer.cross_attention.key for layer in layers)]:
        module.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    with torch.no_grad():
        model.answer_logits(batch)
    assert rows == [5] * (2 + len(layers))


@pytest.mark.parametrize("name", SYSTEMS)
def test_loss_is_the_weighted_cross_entropy_of_every_word(name: str, tokenizer: Tokenizer) -> None:
    """With several weighted answers for a question; a question without answers counts in the
    mean.
    """
    model = decoding_vqa(name, tokenizer)
    target_BV = torch.tensor(
        [[0, 1, 0, 0, 0, 0, 0, 0], [0.3, 0, 0, 1, 0, 0.6, 0, 0], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 1]]
    )
    batch = make_batch(tokenizer, 4, labels_BL=target_BV.masked_fill(target_BV == 0, torch.nan))
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scores = model(batch).total
    gradients = torch.autograd.grad(scores, leaves, allow_unused=True)
    fused = model.fusion_model.features(batch)
    expected = torch.zeros(())
    for row, place in target_BV.nonzero().tolist():
        for log in naive_words(model, read_CD(model, fused, row), ANSWERS[place]):
            expected = expected - target_BV[row, place] * log
    expected = expected / len(batch)
    expected_gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            torch.testing.assert_close(
                gradient, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max()) + 5e-5
            )


def test_batch_without_known_answers_has_zero_loss(tokenizer: Tokenizer) -> None:
    model = decoding_vqa("dual_stream", tokenizer)
    loss = model(make_batch(tokenizer, 3, labels_BL=torch.full((3, len(ANSWERS)), torch.nan))).total
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# Writing


def naive_greedy(model: VQA, context_CD: Tensor) -> tuple[list[int], float]:
    """Return (ids, log-probability) of one question, without a cache."""
    head, tokenizer = decoder_head(model), model.tokenizer
    assert tokenizer is not None
    assert tokenizer.unk_id is not None
    assert tokenizer.mask_id is not None
    never = [tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, tokenizer.mask_id]
    ids, total = [tokenizer.cls_id], 0.0
    while len(ids) < head.config.decoder.max_tokens:
        log_V = next_words(head, context_CD, ids)[-1]
        log_V[never] = -math.inf
        log_V = log_V.log_softmax(dim=0)
        total += float(log_V.max())
        if int(log_V.argmax()) == tokenizer.sep_id:
            break
        ids.append(int(log_V.argmax()))
    return ids[1:], total


@pytest.mark.parametrize("name", SYSTEMS)
def test_cache_changes_no_word(name: str, tokenizer: Tokenizer) -> None:
    model, batch = (
        decoding_vqa(name, tokenizer, "generation", max_tokens=9),
        make_batch(tokenizer, 5),
    )
    with torch.no_grad():
        fused = model.fusion_model.features(batch)
        written = [naive_greedy(model, read_CD(model, fused, row)) for row in range(len(batch))]
        predictions = model.predict(batch)
    assert predictions.answers == [tokenizer.decode(ids) for ids, _ in written]
    torch.testing.assert_close(
        predictions.score_B.log(), torch.tensor([log for _, log in written]), rtol=1e-4, atol=1e-3
    )
    assert len(predictions.score_B.unique()) > 1, (
        "every question has the same answer: nothing is tested"
    )


class WithoutMemory:
    """The same decoder as a `NextToken` without a cache, for beam search."""

    def __init__(self, head: DecoderHead, contexts: list[Tensor], cls_id: int) -> None:
        self.head, self.contexts = head, contexts
        self.written = [[cls_id] for _ in contexts]

    def first(self) -> Tensor:
        beams = len(self.written) // len(self.contexts)
        pairs = [(self.contexts[row // beams], ids) for row, ids in enumerate(self.written)]
        return torch.stack(
            [next_words(self.head, context_CD, ids)[-1] for context_CD, ids in pairs]
        )

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.written = [
            [*self.written[parent], word]
            for parent, word in zip(parent_R.tolist(), ids_R.tolist(), strict=True)
        ]
        return self.first()


def test_beams_share_the_question_cache(tokenizer: Tokenizer) -> None:
    model, batch = (
        decoding_vqa("single_stream", tokenizer, "generation", max_tokens=7, beams=3),
        make_batch(tokenizer, 5),
    )
    assert tokenizer.unk_id is not None
    assert tokenizer.mask_id is not None
    with torch.no_grad():
        fused = model.fusion_model.features(batch)
        contexts = [read_CD(model, fused, row) for row in range(len(batch))]
        expected = search(
            WithoutMemory(decoder_head(model), contexts, tokenizer.cls_id), Decoding(beams=3),
            max_tokens=6, end_id=tokenizer.sep_id, pad_id=tokenizer.pad_id,
            never=(tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, tokenizer.mask_id),
        )  # fmt: skip
        predictions = model.predict(batch)
        greedy = decoding_vqa("single_stream", tokenizer, "generation", max_tokens=7).predict(batch)
    rows = zip(expected.ids_BT, expected.mask_BT, strict=True)
    assert predictions.answers == [tokenizer.decode(ids_T[mask_T]) for ids_T, mask_T in rows]
    torch.testing.assert_close(predictions.score_B.log(), expected.score_B, rtol=1e-4, atol=1e-3)
    assert predictions.answers != greedy.answers


@pytest.mark.training
def test_written_answer_is_mapped_to_the_vocabulary(tokenizer: Tokenizer) -> None:
    """Decoding does not restore the text: `3.4 cm` becomes `3. 4 cm`, which would count as
    wrong.
    """
    words = train_wordpiece([*TEXTS, "3.4 cm", "yes"], vocab_size=200, min_frequency=1)
    model = VQA.on(
        tiny_model("dual_stream", words), ("yes", "3.4 cm"), head="generation", decoder=DECODER
    )
    head = decoder_head(model)
    assert words.decode(head.ids_VT[1]) != "3.4 cm"
    batch = make_batch(words, 2, labels_BL=torch.tensor([[0.0, 1.0]]).repeat(2, 1))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    fit(model, batch, optimizer, 25)
    assert model.eval().predict(batch).answers == ["3.4 cm"] * 2


# Initialisation


def test_decoder_starts_from_the_fusion_encoder_of_albef(tokenizer: Tokenizer) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = tiny_model("albef", tokenizer, text_arguments=sizes, layers=3)
    assert isinstance(model, ALBEF)
    head = decoder_head(VQA.on(model, ANSWERS, head="ranking", decoder=DECODER))
    for layer, fused in zip(head.decoder.layers, model.fusion[-2:], strict=True):
        copied, source = layer.state_dict(), fused.state_dict()
        assert copied.keys() == source.keys()
        assert all(torch.equal(copied[name], source[name]) for name in copied)
        assert all(tensor.data_ptr() != source[name].data_ptr() for name, tensor in copied.items())
    table: Any = model.text_encoder.backbone.embeddings
    assert torch.equal(head.decoder.words.weight, table.word_embeddings.weight)
    known_TD = table.position_embeddings.weight[:15] + table.token_type_embeddings.weight[0]
    assert torch.equal(head.decoder.positions.weight, known_TD)
    assert torch.equal(head.decoder.word_head.bias, model.mlm_head.bias)
    with raises(ConfigError, "conflict", "decoder"):
        VQA.on(model, ANSWERS, head="ranking", decoder=dataclasses.replace(DECODER, layers=4))


def test_decoder_reads_image_states_except_on_albef(tokenizer: Tokenizer) -> None:
    """ALBEF's decoder reads only the question's states, which have attended to the image."""
    for name in SYSTEMS:
        model, batch = decoding_vqa(name, tokenizer), make_batch(tokenizer, 3)
        head = decoder_head(model)
        with torch.no_grad():
            fused = model.fusion_model.features(batch)
            other = Tokens(torch.randn_like(fused.image.states_BND), fused.image.mask_BN)
            same = torch.equal(head.scores(fused), head.scores(fused._replace(image=other)))
        assert same == (name in ("albef", "m2i2", "mumc"))


def test_long_answers_are_cut(tokenizer: Tokenizer) -> None:
    answers = ("the heart is mildly enlarged and the lungs are clear", "yes", "the heart is small")
    model = VQA.on(
        tiny_model("dual_stream", tokenizer),
        answers,
        head="ranking",
        decoder=dataclasses.replace(DECODER, max_tokens=5),
    ).eval()
    head = decoder_head(model)
    assert head.ids_VT.shape == (3, 5)
    assert (head.ids_VT.gather(1, head.length_V[:, None] - 1) == tokenizer.sep_id).all()
    assert torch.equal(head.ids_VT[0], head.ids_VT[2])
    with torch.no_grad():
        scores_BV = model.answer_logits(make_batch(tokenizer, 2))
    torch.testing.assert_close(scores_BV[:, 0], scores_BV[:, 2])


def test_invalid_decoder_settings_are_rejected(tokenizer: Tokenizer) -> None:
    model = tiny_model("dual_stream", tokenizer)
    with raises(ConfigError, "conflict", "decoder.heads"):
        VQA.on(model, ANSWERS, head="ranking", decoder=dataclasses.replace(DECODER, heads=5))
    with raises(ConfigError, "unsupported", "answers", names="answer 2"):
        VQA.on(model, ("yes", " "), head="generation", decoder=DECODER)
    with raises(ConfigError, "missing", "tokenizer"):
        VQA.on(tiny_model("dual_stream", None), ANSWERS, head="ranking", decoder=DECODER)
    for field, value in (
        ("layers", 0),
        ("beams", 0),
        ("shortlist", 0),
        ("dropout", 1.0),
        ("max_tokens", 2),
    ):
        with raises(ConfigError, "out_of_range", field):
            dataclasses.replace(DECODER, **{field: value})
    with raises(ConfigError, "unknown_name", "first_word"):
        DecoderConfig(first_word=cast(Any, "thrice"))
