"""Report writing by MedViLL: its cache against none, beam search, and the report objective."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, make_batch, shaken, tiny_model, tiny_tokenizer
from helpers.learning import fit
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.masked_text import TextMasking
from medvl.errors import ConfigError
from medvl.models.checkpoint import load, save
from medvl.models.downstream.vqa.model import VQA, create_vqa
from medvl.models.fusion_encoders.medvill import MedViLL, MedViLLConfig
from medvl.models.fusion_encoders.parts.transformer import AttentionKind, attention_mask
from medvl.models.fusion_encoders.streams import DualStreamConfig
from medvl.models.text_decoding import Decoding, Generated, search
from medvl.schema import Batch

END, PAD, NEVER = 1, 0, (0, 2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def writer(
    tokenizer: Tokenizer, attention: AttentionKind = "seq2seq", **settings: object
) -> MedViLL:
    """Return a model with random weights; initially all texts are equal."""
    model = tiny_model(
        "medvill",
        tokenizer,
        attention=attention,
        objective="report" if attention == "seq2seq" else "pretraining",
        image_encoder="timm:test_vit",
        image_arguments={"depth": 1},
        **settings,
    )
    assert isinstance(model, MedViLL)
    return shaken(model).eval()


def without_cache(model: MedViLL, image: Tensor, longest: int, has_image: bool = True) -> list[int]:
    """Decode greedily, one image at a time, with the full sequence through BERT's modules at
    every step.
    """
    bert, tokenizer = model.text_encoder.backbone, model.tokenizer
    assert tokenizer is not None
    assert tokenizer.mask_id is not None
    words = bert.embeddings.word_embeddings
    cells = model.image_input(model.image_encoder(image[None]).patches_BPD)[0]
    cells = cells if has_image else cells[:0]
    marks, count = words(torch.tensor([tokenizer.cls_id, tokenizer.sep_id])), len(cells)
    written: list[int] = []
    while len(written) < longest:
        ids = torch.tensor([*written, tokenizer.mask_id])
        vectors = torch.cat([marks[:1], cells, marks[1:], words(ids)])
        places = torch.tensor([0, *range(count), 0, *range(len(ids))])
        types = torch.tensor([0] * (count + 2) + [1] * len(ids))
        hidden = bert.embeddings(
            inputs_embeds=vectors[None], position_ids=places[None], token_type_ids=types[None]
        )
        full_masks = (
            torch.ones(1, count + 2, dtype=torch.bool),
            torch.ones(1, len(ids), dtype=torch.bool),
        )
        additive = (~attention_mask("seq2seq", *full_masks)[:, None]).float() * torch.finfo(
            torch.float32
        ).min
        for layer in bert.encoder.layer:
            hidden = layer(hidden, additive)
        scores_V = model.mlm_head(hidden[0, -1:], words.weight)[0]
        scores_V[
            [tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, tokenizer.mask_id]
        ] = -math.inf
        word = int(scores_V.argmax())
        if word == tokenizer.sep_id:
            break
        written.append(word)
    return written


def rows(generated: Generated) -> list[list[int]]:
    return [
        ids[mask].tolist() for ids, mask in zip(generated.ids_BT, generated.mask_BT, strict=True)
    ]


@pytest.mark.parametrize("attention", ["seq2seq", "bar", "mixed"])
def test_cache_changes_no_word(attention: AttentionKind, tokenizer: Tokenizer) -> None:
    model, batch = writer(tokenizer, attention), make_batch(tokenizer, 6)
    with torch.no_grad():
        expected = [without_cache(model, image, 12) for image in batch.image_BCHW]
    assert len({tuple(words) for words in expected}) > 1, (
        "every image has the same text: nothing is tested"
    )
    assert rows(model.generate(batch.image_BCHW, decoding=Decoding(max_tokens=12))) == expected
    alone = [
        rows(model.generate(image[None], decoding=Decoding(max_tokens=12)))[0]
        for image in batch.image_BCHW
    ]
    assert alone == expected


def test_placeholder_image_is_ignored(tokenizer: Tokenizer) -> None:
    model, batch = writer(tokenizer), make_batch(tokenizer, 3)
    has_image_B = torch.tensor([True, False, True])
    with torch.no_grad():
        expected = [
            without_cache(model, image, 8, has)
            for image, has in zip(batch.image_BCHW, has_image_B.tolist(), strict=True)
        ]
    assert (
        rows(model.generate(batch.image_BCHW, has_image_B, decoding=Decoding(max_tokens=8)))
        == expected
    )


class WithoutCache:
    """The same model as a `NextToken` without a cache, for beam search."""

    def __init__(self, model: MedViLL, image: Tensor) -> None:
        self.model, self.written_RT = model, torch.empty(len(image), 0, dtype=torch.int64)
        self.image = model.image_tokens(image)

    def first(self) -> Tensor:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        rows = len(self.written_RT)
        column = torch.ones(rows, 1, dtype=torch.int64)
        ids_RT = torch.cat(
            [
                tokenizer.cls_id * column,
                self.written_RT,
                tokenizer.mask_id * column,
                tokenizer.sep_id * column,
            ],
            dim=1,
        )
        text = self.model.text_tokens(
            ids_RT, torch.ones_like(ids_RT, dtype=torch.bool)
        )  # the SEP closes the block
        fused = self.model.fuse(text, self.image)
        return self.model.score_words(fused.text.states_BND[:, -2])

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.image = self.image.rows(parent_R)
        self.written_RT = torch.cat([self.written_RT[parent_R], ids_R[:, None]], dim=1)
        return self.first()


@pytest.mark.parametrize("decoding", [Decoding(beams=3), Decoding(beams=4, length_penalty=1.0)])
def test_beams_use_their_own_cache(decoding: Decoding, tokenizer: Tokenizer) -> None:
    model, batch = writer(tokenizer), make_batch(tokenizer, 5)
    assert tokenizer.unk_id is not None
    assert tokenizer.mask_id is not None
    never = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.unk_id, tokenizer.mask_id)
    expected = search(
        WithoutCache(model, batch.image_BCHW), decoding,
        max_tokens=9, end_id=tokenizer.sep_id, pad_id=tokenizer.pad_id, never=never,
    )  # fmt: skip
    generated = model.generate(
        batch.image_BCHW, decoding=dataclasses.replace(decoding, max_tokens=9)
    )
    assert rows(generated) == rows(expected)
    torch.testing.assert_close(generated.score_B, expected.score_B, rtol=1e-4, atol=1e-3)
    assert rows(generated) != rows(
        model.generate(batch.image_BCHW, decoding=Decoding(max_tokens=9))
    )


def test_step_computes_two_tokens_and_the_image_once(tokenizer: Tokenizer) -> None:
    model, batch = writer(tokenizer), make_batch(tokenizer, 2)
    computed: list[int] = []
    model.text_encoder.backbone.encoder.layer[0].register_forward_hook(
        lambda module, given, states: computed.append(given[0].shape[1])
    )
    with torch.no_grad():
        model.mlm_head.bias[tokenizer.sep_id] = -1e4  # never closes
    generated = model.generate(batch.image_BCHW, decoding=Decoding(max_tokens=7))
    assert computed == [18, 1, *[2] * 6]  # 16 cells between CLS and SEP
    assert not generated.ended_B.any()
    assert generated.mask_BT.sum(dim=1).tolist() == [7, 7]


def test_text_that_closes_at_once_is_empty(tokenizer: Tokenizer) -> None:
    model, batch = writer(tokenizer), make_batch(tokenizer, 2)
    with torch.no_grad():
        model.mlm_head.bias[tokenizer.sep_id] = 1e4
    generated = model.generate(batch.image_BCHW)
    assert generated.ids_BT.shape == (2, 0)
    assert generated.ended_B.all()


@pytest.mark.parametrize("attention", ["bidirectional", "non_cross"])
def test_generation_is_rejected_under_masks_that_are_not_causal(
    attention: AttentionKind, tokenizer: Tokenizer
) -> None:
    model, batch = writer(tokenizer, attention), make_batch(tokenizer, 1)
    with raises(ConfigError, "unsupported", "attention"):
        model.generate(batch.image_BCHW)
    with raises(ConfigError, "conflict", "attention"):
        MedViLLConfig(attention=attention, objective="report")


def test_generation_errors(tokenizer: Tokenizer) -> None:
    image_BCHW = make_batch(tokenizer, 1).image_BCHW
    with raises(ConfigError, "conflict"):
        writer(tokenizer).train().generate(image_BCHW)
    with raises(ConfigError, "out_of_range", "max_tokens"):
        writer(tokenizer).generate(image_BCHW, decoding=Decoding(max_tokens=1000))
    without = tiny_model("medvill", None).eval()
    assert isinstance(without, MedViLL)
    with raises(ConfigError, "missing", "tokenizer"):
        without.generate(image_BCHW)
    with raises(ConfigError, "unknown_name", "objective"):
        MedViLLConfig(objective="song")


def shades(tokenizer: Tokenizer) -> Batch:
    """Return four clearly different images, each with its own text."""
    batch = make_batch(tokenizer, 4)
    image_BCHW = torch.zeros_like(batch.image_BCHW)
    for row, (top, left) in enumerate([(0, 0), (0, 32), (32, 0), (32, 32)]):
        image_BCHW[row, :, top : top + 32, left : left + 32] = 255
    return dataclasses.replace(batch, image_BCHW=image_BCHW)


@pytest.mark.training
def test_report_objective_learns_texts_and_their_end(tokenizer: Tokenizer) -> None:
    """Complete reports from pixels only, after at most 300 steps."""
    model = tiny_model(
        "medvill", tokenizer, attention="seq2seq", objective="report", mlm_probability=0.4,
        text_arguments={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64,
                        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )  # fmt: skip
    assert isinstance(model, MedViLL)
    batch = shades(tokenizer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    torch.manual_seed(0)
    expected = [tokenizer.decode(ids) for ids in batch.ids_BT]

    def said(image_BCHW: Tensor, decoding: Decoding) -> list[str]:
        generated = model.eval().generate(image_BCHW, decoding=decoding)
        return [tokenizer.decode(ids) for ids in rows(generated)] if generated.ended_B.all() else []

    decodings = Decoding(), Decoding(beams=3)
    for _ in range(6):
        fit(model.train(), batch, optimizer, 50)
        if all(said(batch.image_BCHW, decoding) == expected for decoding in decodings):
            break
    assert all(said(batch.image_BCHW, decoding) == expected for decoding in decodings)
    assert said(batch.image_BCHW.flip(0), Decoding()) == expected[::-1]


def test_report_objective_equals_mlm_with_matching_images(tokenizer: Tokenizer) -> None:
    """Computed from the parts of `features`; the SEP of the image block is never masked."""
    model = tiny_model(
        "medvill", tokenizer, attention="seq2seq", objective="report", mlm_probability=0.9
    ).eval()
    assert isinstance(model, MedViLL)
    batch = make_batch(tokenizer, 4)
    torch.manual_seed(3)
    result = model(batch)
    torch.manual_seed(3)
    masked = model.masking(batch.ids_BT, batch.mask_BT, torch.default_generator)
    end_B = batch.mask_BT.sum(dim=1) - 1
    row_B = torch.arange(4)
    hidden_B = masked.labels_BT[row_B, end_B] == tokenizer.sep_id
    assert hidden_B.any()
    sep = tokenizer.sep_id * torch.ones(4, 1, dtype=torch.int64)
    behind_BT = torch.cat([masked.ids_BT, sep], dim=1).masked_fill(
        ~torch.cat([batch.mask_BT, batch.mask_BT[:, :1]], 1), 0
    )
    text = model.text_tokens(
        behind_BT, torch.ones_like(behind_BT, dtype=torch.bool)
    )  # the SEP closes the block
    fused = model.fuse(text, model.image_tokens(batch.image_BCHW))
    scores_BTV = model.score_words(fused.text.states_BND[:, :-1])
    mlm = torch.nn.functional.cross_entropy(
        scores_BTV.flatten(0, 1), masked.labels_BT[:, 1:].flatten()
    )
    assert set(result.terms) == {"mlm"}
    torch.testing.assert_close(result.total, mlm)
    result.total.backward()
    still = {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert still == {"pooler", "itm_head"}
    lazy = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert lazy == []


def test_closing_token_is_masked_in_the_report_objective_only(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, 4)
    end_B = batch.mask_BT.sum(dim=1) - 1
    for objective, rate in (("pretraining", 0.0), ("report", 0.5)):
        model = tiny_model("medvill", tokenizer, objective=objective, mlm_probability=0.5)
        generator = torch.Generator().manual_seed(0)
        hidden = [
            model.masking(batch.ids_BT, batch.mask_BT, generator).labels_BT for _ in range(400)
        ]
        share = (
            torch.stack([labels_BT[torch.arange(4), end_B] >= 0 for labels_BT in hidden])
            .float()
            .mean()
        )
        assert float(share) == pytest.approx(rate, abs=0.05)
        others = torch.stack([labels_BT[:, 0] for labels_BT in hidden])
        assert (others < 0).all()


def test_closing_token_is_not_part_of_a_word(tokenizer: Tokenizer) -> None:
    """With whole words it is masked as often as a word, alone or with others."""
    batch = make_batch(tokenizer, 4)
    masking = TextMasking(tokenizer, rate=0.4, mask_end=True)
    row_B, end_B = torch.arange(4), batch.mask_BT.sum(dim=1) - 1
    words_BT = tokenizer.word_ids(batch.ids_BT, batch.mask_BT)
    generator, together = torch.Generator().manual_seed(0), []
    for _ in range(300):
        hidden_BT = masking(batch.ids_BT, batch.mask_BT, generator).labels_BT >= 0
        together.append(torch.stack([hidden_BT[row_B, end_B], hidden_BT[row_B, end_B - 1]]))
        for row in range(4):
            for word in range(int(words_BT[row].max()) + 1):
                assert hidden_BT[row][words_BT[row] == word].unique().numel() == 1
    share_2N = torch.stack(together, dim=1).float().flatten(1)
    assert share_2N.mean(dim=1).tolist() == pytest.approx([0.4, 0.4], abs=0.06)
    assert float(torch.corrcoef(share_2N)[0, 1]) == pytest.approx(
        0, abs=0.2
    )  # every text gets at least one mask


def test_report_model_can_start_vqa(tokenizer: Tokenizer) -> None:
    model = VQA.on(tiny_model("medvill", tokenizer, objective="report"), ("yes", "no"))
    frozen = {name.split(".")[1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"itm_head", "mlm_head"}


@pytest.mark.parametrize("in_memory", [False, True])
def test_questions_to_a_report_writer_reach_the_answer(
    tokenizer: Tokenizer, tmp_path: Path, in_memory: bool
) -> None:
    """Under the sequence-to-sequence mask no token of the image block attends to the question."""
    torch.manual_seed(0)
    report_writer = tiny_model("medvill", tokenizer, attention="seq2seq", objective="report")
    if in_memory:
        model = VQA.on(report_writer, ("yes", "no")).eval()
    else:
        save(report_writer, tmp_path)
        model = create_vqa(tmp_path, ("yes", "no"), fusion=DualStreamConfig()).eval()
    batch, other = make_batch(tokenizer, 2), make_batch(tokenizer, 2, texts=TEXTS[::-1])
    own_BA, other_BA = (
        model.answer_logits(dataclasses.replace(each, image_BCHW=batch.image_BCHW))
        for each in (batch, other)
    )
    assert (own_BA - other_BA).abs().max() > 1e-5
    assert model.fusion_model.can_match
    (tmp_path / "vqa").mkdir()
    save(model, tmp_path / "vqa")
    loaded = load(tmp_path / "vqa").eval()
    assert isinstance(loaded, VQA)
    assert torch.equal(loaded.answer_logits(batch), own_BA)


def test_reference_texts_are_never_read(tokenizer: Tokenizer) -> None:
    """The reference is not an argument, and nothing is stored from earlier batches."""
    model = writer(tokenizer)
    batch = make_batch(tokenizer, 4)
    before = model.generate(batch.image_BCHW)
    model.features(make_batch(tokenizer, 4, texts=TEXTS[::-1]))  # must leave no state
    assert torch.equal(model.generate(batch.image_BCHW).ids_BT, before.ids_BT)


def test_loaded_checkpoint_writes_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = writer(tokenizer)
    save(model, tmp_path)
    loaded = medvl.load(tmp_path)
    assert isinstance(loaded, MedViLL)
    image_BCHW = make_batch(tokenizer, 4).image_BCHW
    assert rows(loaded.generate(image_BCHW)) == rows(model.generate(image_BCHW))
