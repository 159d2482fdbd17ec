"""ARL: graph attention, the stream of entities, alignment with the graph, and masking of whole
entities.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.fusion_samples import (
    ENTITIES,
    TINY,
    flags,
    knowledge_folder,
    make_batch,
    shaken,
    tiny_model,
    tiny_tokenizer,
)
from torch import Tensor

import medvl
from medvl.data import EntityLinker, WholeText, read_knowledge
from medvl.data.knowledge.finder import LinkedEntities
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import TextMasking
from medvl.errors import ConfigError, CorpusError
from medvl.models.checkpoint import save
from medvl.models.fusion_encoders.arl import ARL, ARLConfig, mentioned
from medvl.models.fusion_encoders.parts.knowledge import (
    GraphAttention,
    GraphSizes,
    at_mentions,
    without_masked,
)
from medvl.schema import Batch, Sample

SIZES = GraphSizes(entities=50, triples=120, names=90, longest_name=4, sha256="")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Tokenizer) -> ARL:
    arl = tiny_model("arl", tokenizer)
    assert isinstance(arl, ARL)
    return arl


def linked(model: ARL, batch: Batch) -> Batch:
    """The batch with entities, as a loader makes it."""
    assert model.tokenizer is not None
    assert model.inputs.entities is not None
    found = EntityLinker(model.inputs.entities, model.tokenizer)(batch.ids_BT, batch.mask_BT)
    return dataclasses.replace(batch, **found._asdict(), image_entity_BN=found.entity_BN)


def test_paper_model_has_published_sizes() -> None:
    """Shapes of the released code's state dict; the graph is counted apart, and parts that never
    learn are left out.
    """
    with torch.device("meta"):
        model = ARL.build(ARLConfig(graph=SIZES), pretrained=False, tokenizer=None)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    entities = "fusion.text_layers.0.entities."
    assert shapes[f"{entities}attention.query.weight"] == [256, 256]
    assert shapes[f"{entities}cross_attention.key.weight"] == [256, 256]
    assert shapes[f"{entities}feed_forward.inner.weight"] == [1024, 256]
    assert shapes[f"{entities}from_image.weight"] == [256, 768]
    assert shapes[f"{entities}to_text.weight"] == [768, 256]
    assert shapes["fusion.text_layers.5.merge.weight"] == [768, 768]
    assert shapes["align_head.graph.first.project.weight"] == [512, 256]
    assert shapes["align_head.graph.second.project.weight"] == [256, 512]
    assert shapes["align_head.image.2.weight"] == [256, 768]
    attention, feed = 4 * (256 * 257) + 512, 256 * 1024 * 2 + 1280 + 512
    projections = 256 * 769 + 768 * 257
    clip_text, pooler = 49_408 * 512 + 77 * 512 + 2 * 512, 768 * 769
    # not here: position tables of the pixel decoder and of RoBERTa's ids, the last layer's
    # entities, a feed-forward
    unread = 2 * attention + projections + 2 * feed
    own = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("align_head."))
    assert (own + clip_text + pooler + unread + 325 * 384) / 1e6 == pytest.approx(403.881, rel=1e-4)
    config = ARLConfig()
    assert (config.itm_weight, config.mlm_weight, config.mim_weight, config.align_weight) == (
        0.1,
        1,
        1,
        1,
    )


def naive_graph_attention(layer: GraphAttention, states_VD: Tensor, edges_2M: Tensor) -> Tensor:
    """Equations 1 to 5 of the GAT paper, node by node and head by head."""
    nodes = []
    for node in range(len(states_VD)):
        sources = edges_2M[0][edges_2M[1] == node]
        heads = []
        for head, weight_CD in enumerate(layer.project.weight.unflatten(0, (layer.heads, -1))):
            projected_VC = states_VD @ weight_CD.T
            score_S = (
                projected_VC[sources] @ layer.source[head] + projected_VC[node] @ layer.target[head]
            )
            heads.append(F.leaky_relu(score_S, 0.2).softmax(0) @ projected_VC[sources])
        nodes.append(torch.cat(heads))
    return torch.stack(nodes) + layer.bias


def test_graph_attention_equals_its_equations() -> None:
    torch.manual_seed(0)
    layer = GraphAttention(5, 3, 2, dropout=0.5).eval()
    edges_2M = torch.tensor(
        [[0, 1, 1, 2, 0, 3, 1, 2, 3], [1, 0, 0, 1, 0, 1, 1, 2, 3]]
    )  # 2, 3 alone; 1 to 0 twice
    states_VD = torch.randn(4, 5, requires_grad=True)
    results = [
        function(layer, states_VD, edges_2M)
        for function in (GraphAttention.forward, naive_graph_attention)
    ]
    torch.testing.assert_close(*results)
    weights = torch.randn_like(results[0])
    gradients = [
        torch.autograd.grad((result * weights).sum(), [states_VD, *layer.parameters()])
        for result in results
    ]
    torch.testing.assert_close(*gradients)
    assert (layer(1e4 * states_VD, edges_2M)).isfinite().all()


def test_graph_is_encoded_once_a_step(
    model: ARL, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    forward = GraphAttention.forward
    monkeypatch.setattr(
        GraphAttention, "forward", lambda *arguments: calls.append(1) or forward(*arguments)
    )
    model(make_batch(tokenizer))
    assert len(calls) == 2  # two layers
    model(make_batch(tokenizer))
    assert len(calls) == 4


def test_edges_go_from_heads_to_tails_and_to_the_entity_itself(model: ARL) -> None:
    graph = read_knowledge(knowledge_folder())
    edges = set(map(tuple, model.align_head.graph.edges_2M.T.tolist()))
    assert edges == {(h, t) for h, _, t in graph.triples_N3.tolist()} | {
        (n, n) for n in range(len(ENTITIES))
    }


def test_words_outside_of_mentions_get_nothing() -> None:
    entity_BND = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]])
    added_BTD = at_mentions(entity_BND, torch.tensor([[-1, 1, 1, 0], [0, -1, -1, -1]]))
    assert added_BTD.tolist() == [
        [[0, 0], [3, 4], [3, 4], [1, 2]],
        [[5, 6], [0, 0], [0, 0], [0, 0]],
    ]


def test_entities_with_a_masked_word_are_left_out() -> None:
    whole = LinkedEntities(
        torch.tensor([[7, 8, 9], [6, -1, -1]]),
        torch.tensor([[0, 0, -1, 1, 2], [0, -1, -1, -1, -1]]),
    )
    kept = without_masked(whole, torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]).bool())
    assert kept.entity_BN.tolist() == [[-1, 8, 9], [6, -1, -1]]


def test_masked_words_cannot_be_read_from_their_entity(model: ARL, tokenizer: Tokenizer) -> None:
    """Predictions do not depend on which entity a masked mention has."""
    model.eval()
    batch = linked(model, make_batch(tokenizer))
    torch.manual_seed(1)
    corruption = model.corrupt(batch)
    masked_BT = corruption.of(model.mlm).labels_BT != IGNORED
    hidden_BN = (
        without_masked(LinkedEntities(batch.entity_BN, batch.mention_BT), masked_BT).entity_BN
        != batch.entity_BN
    )
    assert hidden_BN.any()
    other = dataclasses.replace(batch, entity_BN=torch.where(hidden_BN, 6, batch.entity_BN))
    words, others = (model.predict(each, corruption)["mlm"] for each in (batch, other))
    torch.testing.assert_close(words, others)
    visible = dataclasses.replace(
        batch, entity_BN=torch.where(hidden_BN, batch.entity_BN, batch.entity_BN.clamp(max=0))
    )
    assert not torch.equal(model.predict(visible, corruption)["mlm"], words)


def test_entities_and_their_padding(model: ARL, tokenizer: Tokenizer) -> None:
    """Entities change what is fused; columns of padding and other texts' entities do not."""
    shaken(model).eval()
    batch = linked(model, make_batch(tokenizer))
    assert batch.entity_BN is not None
    pooled_BD = model.features(batch).pooled_BD
    more = dataclasses.replace(batch, entity_BN=F.pad(batch.entity_BN, (0, 3), value=-1))
    torch.testing.assert_close(model.features(more).pooled_BD, pooled_BD, rtol=1e-4, atol=1e-5)
    none = dataclasses.replace(batch, entity_BN=torch.full_like(batch.entity_BN, -1))
    alone = model.features(none).pooled_BD
    assert alone.isfinite().all()
    assert not torch.allclose(alone, pooled_BD, atol=1e-4)
    ids = model.text_tokens(batch.ids_BT, batch.mask_BT)  # found in the ids, as by the loader
    torch.testing.assert_close(model.fuse(ids, model.images_of_rows(batch)).pooled_BD, pooled_BD)


def test_alignment_equals_its_formula(model: ARL, tokenizer: Tokenizer) -> None:
    shaken(model).eval()
    batch = linked(
        model, make_batch(tokenizer, 4, has_image_B=flags(1, 0, 1, 1), has_text_B=flags(1, 1, 0, 1))
    )
    batch = dataclasses.replace(
        batch, image_entity_BN=torch.tensor([[0, 7], [1, -1], [2, -1], [-1, -1]])
    )
    torch.manual_seed(0)
    term = model(batch).terms["align"]
    head, entities = model.align_head, model.align_head.graph()
    text_BTD, image_BPD = model.fusion.mark(
        model.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B),
        model.image_tokens(batch.image_BCHW, batch.has_image_B),
    )
    expected = []
    for side, first_BD, rows in (
        (head.image, image_BPD[:, 0], [0, 3]),
        (head.text, text_BTD[:, 0], [0, 1, 3]),
    ):
        values = []
        for row in rows:
            mentions = batch.image_entity_BN if side is head.image else batch.entity_BN
            for entity in range(len(ENTITIES)):
                hidden = F.relu(side[2](F.relu(side[0](first_BD[row]))))
                score = hidden @ entities[entity]
                values.append(-F.logsigmoid(score if entity in mentions[row].tolist() else -score))
        expected.append(torch.stack(values).mean())
    torch.testing.assert_close(term, expected[0] + expected[1], rtol=1e-4, atol=1e-5)
    gradients = [
        torch.autograd.grad(value, head.image[0].weight)[0]
        for value in (term, expected[0] + expected[1])
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_targets_count_each_entity_once() -> None:
    target_BV = mentioned(torch.tensor([[2, 2, -1], [-1, -1, -1], [0, 1, 2]]), 4, flags(1, 1, 0))
    assert target_BV[:2].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert target_BV[2].isnan().all()


def test_mentions_are_masked_as_a_whole(tokenizer: Tokenizer) -> None:
    masking = TextMasking(tokenizer, rate=0.3)
    ids_BT, mask_BT = tokenizer(["dense consolidation of the right lower lobe is small"] * 200)
    tokens = [tokenizer.token_texts[number].strip() for number in ids_BT[0].tolist()]
    first = next(n for n in range(len(tokens)) if "".join(tokens[n:]).startswith("rightlower"))
    last = next(
        n for n in range(first, len(tokens)) if "".join(tokens[first : n + 1]) == "rightlowerlobe"
    )
    span_BT = torch.full_like(ids_BT, -1)
    span_BT[:, first : last + 1] = 0
    chosen_BT = (
        masking(ids_BT, mask_BT, torch.Generator().manual_seed(0), span_BT).labels_BT != IGNORED
    )
    inside_BT = chosen_BT[:, first : last + 1]
    assert (inside_BT.all(dim=1) == inside_BT.any(dim=1)).all()
    assert inside_BT[:, 0].float().mean().item() == pytest.approx(0.3, abs=0.09)
    assert chosen_BT[:, first - 1].float().mean().item() == pytest.approx(0.3, abs=0.09)
    apart_BT = (
        masking(ids_BT, mask_BT, torch.Generator().manual_seed(0)).labels_BT[:, first : last + 1]
        != IGNORED
    )
    assert (apart_BT.all(dim=1) != apart_BT.any(dim=1)).any()


def test_entities_come_from_the_loader(model: ARL, tokenizer: Tokenizer) -> None:
    """The model finds the same entities in ids; an image has those of all its sample's texts."""
    sections = {"findings": "Small effusion.", "impression": "No pneumothorax."}
    sample = Sample(key="0", corpus="c", split="train", patient="p", study="s", sections=sections)
    maker = ItemMaker(
        EvalTransform(size=64), WholeText(sections=("impression",)), (), 0, model.inputs
    )
    batch, _ = Collate(tokenizer, model.inputs)(
        [maker(sample, make_batch(tokenizer).image_BCHW[0, 0].numpy(), 0)]
    )
    assert batch is not None
    assert batch.entity_BN is not None
    assert batch.image_entity_BN is not None
    assert batch.entity_BN.tolist() == [[1]]
    assert sorted(batch.image_entity_BN[0].tolist()) == [0, 1]
    bare = dataclasses.replace(batch, entity_BN=None, mention_BT=None)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.link(bare), model.link(batch), strict=True)
    )
    assert model(batch).total.isfinite()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch).total.isfinite()


def test_checkpoints_need_no_folder_and_keep_the_dictionary(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    knowledge = tmp_path / "knowledge"
    knowledge.symlink_to(knowledge_folder())
    model = tiny_model("arl", tokenizer, knowledge=str(knowledge)).eval()
    knowledge.unlink()
    (tmp_path / "checkpoint").mkdir()
    save(model, tmp_path / "checkpoint")
    loaded = medvl.load(tmp_path / "checkpoint")
    assert isinstance(loaded, ARL)
    text = "Right lower lobe consolidation, no effusion."
    assert loaded.inputs.entities is not None
    assert [entity for _, _, entity in loaded.inputs.entities.find(text)] == [4, 5, 0]
    settings = {**TINY["arl"], "knowledge": str(knowledge)}
    with raises(CorpusError, "not_found"):
        medvl.create_model("arl", tokenizer=tokenizer, **settings)
    with raises(ConfigError, "missing", "knowledge"):
        tiny_model("arl", tokenizer, knowledge=None)
    with raises(ConfigError, "mismatch", "entity_width"):
        tiny_model("arl", tokenizer, entity_width=12)
    with raises(ConfigError, "conflict", "entity_heads"):
        ARLConfig(entity_heads=3)


def test_the_graph_is_read_while_models_are_built_on_the_meta_device(tokenizer: Tokenizer) -> None:
    """As `medvl benchmark --dry-run` builds them, which failed when the folder existed."""
    with torch.device("meta"):
        model = tiny_model("arl", tokenizer)
    assert isinstance(model, ARL)
    assert all(parameter.is_meta for parameter in model.parameters())
