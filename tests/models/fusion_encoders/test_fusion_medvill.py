"""MedViLL: joint sequence, attention masks, sampled cells and negatives."""

import dataclasses

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, make_batch, tiny_model, tiny_tokenizer
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.medvill import MedViLL, MedViLLConfig
from medvl.models.fusion_encoders.parts.transformer import AttentionKind, attention_mask
from medvl.schema import Batch


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def make(tokenizer: Tokenizer, **settings: object) -> MedViLL:
    model = tiny_model("medvill", tokenizer, **settings)
    assert isinstance(model, MedViLL)
    return model


def objective_of(attention: AttentionKind) -> dict[str, str]:
    """Return the objective that a mask is trained by: ITM needs a first token that sees the
    text.
    """
    return {"objective": "report"} if attention == "seq2seq" else {}


def naive_states(model: MedViLL, batch: Batch, row: int) -> Tensor:
    """(S, D) of one sample: `[CLS] cells [SEP] text [SEP]` through BERT's own modules, without
    padding.
    """
    bert, tokenizer = model.text_encoder.backbone, model.tokenizer
    assert tokenizer is not None
    ids = batch.ids_BT[row][batch.mask_BT[row]][1:]
    cells = model.image_encoder(batch.image_BCHW[[row]]).patches_BPD
    words = bert.embeddings.word_embeddings
    marks = words(torch.tensor([tokenizer.cls_id, tokenizer.sep_id]))
    vectors = torch.cat([marks[:1], model.image_input(cells)[0], marks[1:], words(ids)])
    count = cells.shape[1]
    places = torch.tensor([0, *range(count), 0, *range(len(ids))])
    types = torch.tensor([0] * (count + 2) + [1] * len(ids))
    hidden = bert.embeddings(
        inputs_embeds=vectors[None], position_ids=places[None], token_type_ids=types[None]
    )
    whole = torch.ones(1, count + 2, dtype=torch.bool), torch.ones(1, len(ids), dtype=torch.bool)
    mask_BSS = attention_mask(model.config.attention, *whole)
    additive = (~mask_BSS[:, None]).float() * torch.finfo(torch.float32).min
    for layer in bert.encoder.layer:
        hidden = layer(hidden, additive)
    return hidden[0]


@pytest.mark.parametrize("attention", ["bidirectional", "seq2seq", "bar", "non_cross"])
def test_sequence_equals_bert(attention: AttentionKind, tokenizer: Tokenizer) -> None:
    model = make(tokenizer, attention=attention, **objective_of(attention)).eval()
    batch = make_batch(tokenizer, 4)
    fused = model.features(batch)
    for row in range(4):
        expected = naive_states(model, batch, row)
        real = int(batch.mask_BT[row].sum()) - 1
        images = fused.image.states_BND.shape[1]
        torch.testing.assert_close(
            fused.image.states_BND[row], expected[:images], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            fused.text.states_BND[row, :real], expected[images:], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("attention", "text_sees_later_words", "image_sees_text"),
    [
        ("bar", False, True),
        ("seq2seq", False, False),
        ("bidirectional", True, True),
        ("mixed", True, True),
    ],
)
def test_attention_masks_hide_later_words(
    attention: AttentionKind,
    text_sees_later_words: bool,
    image_sees_text: bool,
    tokenizer: Tokenizer,
) -> None:
    model = make(tokenizer, attention=attention, **objective_of(attention)).eval()
    batch = make_batch(tokenizer, 2, texts=TEXTS[2:])
    ids_BT = batch.ids_BT.clone()
    ids_BT[:, 5] = ids_BT[:, 1]
    before, after = model.features(batch), model.features(dataclasses.replace(batch, ids_BT=ids_BT))
    earlier = slice(0, 4)  # ids 1 to 4
    same = torch.allclose(
        before.text.states_BND[:, earlier], after.text.states_BND[:, earlier], atol=1e-5
    )
    assert same is not text_sees_later_words
    assert torch.allclose(before.pooled_BD, after.pooled_BD, atol=1e-5) is not image_sees_text


def test_separate_blocks_are_pooled_from_both(tokenizer: Tokenizer) -> None:
    """Under "non_cross" CLS reads no text: the pooled vector is its product with the closing
    token of the text.
    """
    model, batch = make(tokenizer, attention="non_cross").eval(), make_batch(tokenizer, 4)
    fused = model.features(batch)
    last_B = batch.mask_BT.sum(dim=1) - 2  # without CLS
    closing_B1D = fused.text.states_BND[torch.arange(4), last_B][:, None]
    expected_BD = model.pooler(fused.image.states_BND) * model.pooler(closing_B1D)
    torch.testing.assert_close(fused.pooled_BD, expected_BD)
    other = dataclasses.replace(
        batch, ids_BT=batch.ids_BT.roll(1, 0), mask_BT=batch.mask_BT.roll(1, 0)
    )
    assert not torch.allclose(model.features(other).pooled_BD, fused.pooled_BD, atol=1e-4)
    assert model.for_reading().config.attention == "bidirectional"


@pytest.mark.parametrize("attention", ["bar", "mixed", "bidirectional"])
def test_heads_read_all_cells_in_both_directions(
    attention: AttentionKind, tokenizer: Tokenizer
) -> None:
    """As in the released fine-tuning: without the mask of pretraining, and without a draw of
    cells.
    """
    encoder = {"image_size": 64, "image_encoder": "timm:test_vit", "image_arguments": {"depth": 1}}
    model = make(tokenizer, image_tokens=3, attention=attention, **encoder)
    reader, batch = model.for_reading().train(), make_batch(tokenizer, 2)
    assert (reader.config.attention, reader.config.image_tokens) == ("bidirectional", 16)
    assert reader.image_tokens(batch.image_BCHW).states_BND.shape[1] == 16
    assert reader.for_reading() is reader
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in reader.state_dict().items()
    )


def test_cells_are_sampled_in_training_only(tokenizer: Tokenizer) -> None:
    model = make(
        tokenizer,
        image_tokens=3,
        image_size=64,
        image_encoder="timm:test_vit",
        image_arguments={"depth": 1},
    )
    batch = make_batch(tokenizer, 2)
    model.eval()
    whole = model.image_tokens(batch.image_BCHW).states_BND
    assert whole.shape[1] == 16
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    drawn = model.image_tokens(batch.image_BCHW).states_BND
    assert drawn.shape[1] == 3
    places = [
        next(
            place
            for place in range(16)
            if torch.allclose(whole[:, place], drawn[:, index], atol=1e-5)
        )
        for index in range(3)
    ]
    assert places == sorted(set(places))
    assert not torch.equal(drawn, model.image_tokens(batch.image_BCHW).states_BND)


def test_equal_labels_are_not_negatives(tokenizer: Tokenizer) -> None:
    """A text with the same CheXpert labels may well describe the image; NaN, not mentioned,
    equals NaN.
    """
    nan = float("nan")
    labels_BL = torch.tensor([[1.0, nan], [1.0, nan], [0.0, nan], [1.0, nan]])
    model = make(tokenizer)
    batch = make_batch(tokenizer, 4, labels_BL=labels_BL)
    for seed in range(30):
        torch.manual_seed(seed)
        pairs = model.corrupt(batch).of(model.itm)
        wrong = (~pairs.matched_N).nonzero().squeeze(1)
        assert len(wrong) == 2
        for row in wrong.tolist():
            assert 2 in (int(pairs.image_N[row]), int(pairs.text_N[row]))


def test_samples_without_labels_have_negatives(tokenizer: Tokenizer) -> None:
    """NaN in every column is not a label string that two samples share."""
    nan = float("nan")
    model = make(tokenizer)
    batch = make_batch(tokenizer, 6, labels_BL=torch.full((6, 3), nan))
    assert model.sample_pairs(batch).matched_N.sum() == 3
    mixed = make_batch(
        tokenizer, 4, labels_BL=torch.tensor([[nan, nan], [nan, nan], [1.0, nan], [1.0, nan]])
    )
    negatives = set()
    for seed in range(60):
        torch.manual_seed(seed)
        pairs = model.sample_pairs(mixed)
        wrong = ~pairs.matched_N
        negatives |= set(
            zip(pairs.text_N[wrong].tolist(), pairs.image_N[wrong].tolist(), strict=True)
        )
    assert {(0, 1), (1, 0), (0, 2)} <= negatives  # within the corpus without labels, and across
    assert not {(2, 3), (3, 2)} & negatives


@pytest.mark.parametrize("system", ["medvill", "single_stream"])
def test_itm_under_seq2seq_is_refused(system: str, tokenizer: Tokenizer) -> None:
    """The pooled token does not see the text, and the loss stays at ln 2."""
    with raises(ConfigError, "conflict", "attention"):
        tiny_model(system, tokenizer, attention="seq2seq")
    make(tokenizer, attention="seq2seq", objective="report")


def test_one_pass_computes_both_losses(tokenizer: Tokenizer) -> None:
    """Every text is fused with its sampled image, and words are predicted next to wrong images
    too.
    """
    model = make(tokenizer).eval()
    batch = make_batch(tokenizer)
    passes = []
    model.text_encoder.backbone.encoder.layer[0].register_forward_hook(lambda *_: passes.append(1))
    torch.manual_seed(1)
    result = model(batch)
    assert len(passes) == 1
    torch.manual_seed(1)
    corruption = model.corrupt(batch)
    words, pairs = corruption.of(model.mlm), corruption.of(model.itm)
    swapped = dataclasses.replace(
        batch,
        ids_BT=words.ids_BT,
        image_BCHW=batch.image_BCHW[pairs.image_N[pairs.text_N.argsort()]],
    )
    fused = model.features(swapped)
    table = model.text_encoder.backbone.embeddings.word_embeddings.weight
    words_BTV = model.mlm_head(fused.text.states_BND, table)
    mlm = torch.nn.functional.cross_entropy(
        words_BTV.flatten(0, 1), words.labels_BT[:, 1:].flatten()
    )
    itm = torch.nn.functional.cross_entropy(model.itm_head(fused.pooled_BD), pairs.matched_N.long())
    torch.testing.assert_close(result.terms["mlm"], mlm)
    torch.testing.assert_close(result.terms["itm"], itm)


def test_defaults_and_parameter_counts_are_published() -> None:
    config = MedViLLConfig()
    assert (config.image_encoder, config.text_encoder, config.image_size) == (
        "resnet50",
        "bert",
        512,
    )
    assert (config.image_tokens, config.attention, config.frozen_image_layers) == (180, "bar", 1)
    with torch.device("meta"):
        model = MedViLL.build(config, pretrained=False, tokenizer=None)
    counts = {
        name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()
    }
    assert counts["image_encoder"] == 23_508_032
    assert counts["text_encoder"] == 109_482_240 - 590_592  # BERT-base without its pooler ...
    assert counts["pooler"] == 590_592  # ... which is here
    assert counts["image_input"] == 2049 * 768
    assert counts["mlm_head"] == 769 * 768 + 2 * 768 + 30_522
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all(name.split(".")[2] in ("conv1", "bn1", "layer1") for name in frozen), frozen


def test_other_text_encoders_and_large_grids_are_rejected(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "unsupported", "text_encoder", names="hf:roberta"):
        make(tokenizer, text_encoder="hf:roberta")
    with raises(ConfigError, "too_large", "image_size"):
        make(
            tokenizer,
            image_encoder="timm:test_vit",
            text_arguments={
                "hidden_size": 32,
                "num_attention_heads": 2,
                "max_position_embeddings": 10,
            },
        )
