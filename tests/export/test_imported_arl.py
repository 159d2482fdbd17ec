"""Imported ARL against its published layers, written out plainly from the file's own keys, on a
small random file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    Tensors,
    bert_attention,
    bert_feed_forward,
    bert_layer_shapes,
    cross_layer,
    imported,
    linear,
    m3ae_shapes,
    norm,
    texts,
)
from torch import Tensor

import medvl
from medvl.data.knowledge.finder import LinkedEntities
from medvl.errors import ConfigError, WeightsError
from medvl.export import import_checkpoint
from medvl.models.fusion_encoders.streams import DualStreamModel

LAYERS, ENTITY_WIDTH, HEADS, HEAD_WIDTH = 6, 64, 2, 4
NAMES = ("pleural effusion", "lung", "heart", "rib", "catheter")
EDGES = torch.tensor([[0, 2, 3, 3, 3, 1], [1, 1, 0, 0, 3, 2]])  # 3 to 0 twice, and 3 to itself
NEAR = {"atol": 2e-4, "rtol": 1e-3}


def arl_file() -> Tensors:
    """Names of torch_geometric 2.0 to 2.4, where source and target share a projection."""
    shapes = m3ae_shapes(LAYERS)
    for layer in range(LAYERS):
        name = f"multi_modal_language_layers.{layer}."
        shapes |= {
            f"{name}image2knowledge.weight": (ENTITY_WIDTH, WIDTH),
            f"{name}image2knowledge.bias": (ENTITY_WIDTH,),
            f"{name}knowledge2text.weight": (WIDTH, ENTITY_WIDTH),
            f"{name}knowledge2text.bias": (WIDTH,),
            f"{name}knowledge_fusion_output.dense.weight": (WIDTH, WIDTH),
            **{
                f"{name}knowledge_fusion_output.{leaf}": (WIDTH,)
                for leaf in ("dense.bias", *_norm("LayerNorm"))
            },
        }
        for key, shape in bert_layer_shapes(
            "", ["knowledge_attention", "knowledge_crossattention"]
        ).items():
            part = f"knowledge_{key}" if key.startswith(("intermediate", "output")) else key
            shapes[name + part] = tuple(ENTITY_WIDTH * size // WIDTH for size in shape)
    graph = {
        "conv1": (ENTITY_WIDTH, HEADS, HEAD_WIDTH),
        "conv2": (HEADS * HEAD_WIDTH, 1, ENTITY_WIDTH),
    }
    for conv, (wide, heads, width) in graph.items():
        name = f"align_head.{conv}"
        shapes |= {
            f"{name}.lin_src.weight": (heads * width, wide),
            f"{name}.bias": (heads * width,),
        }
        shapes |= {f"{name}.{att}": (1, heads, width) for att in ("att_src", "att_dst")}
    for side in ("img", "txt"):
        for number, width in ((1, WIDTH), (2, ENTITY_WIDTH)):
            name = f"align_head.{side}_linear{number}"
            shapes |= {f"{name}.weight": (width, WIDTH), f"{name}.bias": (width,)}
    shapes |= {"align_head.x": (len(NAMES), ENTITY_WIDTH)}
    shapes |= {f"align_head.{leaf}": (ENTITY_WIDTH,) for leaf in _norm("embedding_ln")}
    file = {**random_tensors(shapes), "align_head.edge_index": EDGES}
    return file | {
        f"align_head.{conv}.lin_dst.weight": file[f"align_head.{conv}.lin_src.weight"]
        for conv in graph
    }


def _norm(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def entity_file(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Return ARL's entity2id.txt; its last line has a synonym as well."""
    lines = [f"C{number:07d}\t{number}\t{name}" for number, name in enumerate(names)]
    path = folder / "entity2id.txt"
    path.write_text("\n".join([str(len(names)), *lines]) + "\tcentral line\n")
    return path


def published_graph(file: Tensors) -> Tensor:
    """Return the entities (V, D) by two GATConv, as dense matrices."""
    counts_VV = torch.eye(len(NAMES))
    for source, target in EDGES.T.tolist():
        counts_VV[target, source] += source != target  # GATConv replaces edges of a node to itself

    def attention(x_VD: Tensor, name: str) -> Tensor:
        heads = []
        source, target = file[f"{name}.att_src"][0], file[f"{name}.att_dst"][0]
        for head, weight in enumerate(file[f"{name}.lin_src.weight"].chunk(len(source))):
            mapped_VC = x_VD @ weight.T
            scores_VV = F.leaky_relu(
                mapped_VC @ target[head][:, None] + mapped_VC @ source[head], 0.2
            )
            weights_VV = counts_VV * scores_VV.exp()
            heads.append(weights_VV / weights_VV.sum(1, keepdim=True) @ mapped_VC)
        return torch.cat(heads, dim=1) + file[f"{name}.bias"]

    x_VD = norm(file["align_head.x"], file, "align_head.embedding_ln", 1e-5)
    return attention(F.elu(attention(x_VD, "align_head.conv1")), "align_head.conv2")


def knowledge_layer(
    t: Tensor,
    v: Tensor,
    z: Tensor,
    file: Tensors,
    name: str,
    hidden: Tensor,
    places: Tensor,
    entity_hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return words and entities after a BertCrossLayerWithKnowledge; `places` (B, N, T) is 1 at
    words of mentions.
    """
    t = bert_attention(t, t, file, f"{name}attention", 1e-12, hidden)
    z = bert_attention(z, z, file, f"{name}knowledge_attention", 1e-12, entity_hidden)
    image = linear(v, file, f"{name}image2knowledge")
    z = bert_attention(z, image, file, f"{name}knowledge_crossattention", 1e-12, None)
    t = bert_attention(t, v, file, f"{name}crossattention", 1e-12, None)
    known = t + places.transpose(1, 2) @ linear(z, file, f"{name}knowledge2text")
    merged = linear(known, file, f"{name}knowledge_fusion_output.dense") + t
    t = bert_feed_forward(
        norm(merged, file, f"{name}knowledge_fusion_output.LayerNorm", 1e-12), file, name, 1e-12
    )
    return t, bert_feed_forward(z, file, f"{name}knowledge_", 1e-12)


@torch.no_grad()
def test_arl_import_equals_its_graph_streams_and_heads(tmp_path: Path) -> None:
    """Also the entities of the last layer, which medvl leaves out, change no token that is read."""
    file = arl_file()
    model = imported(file, "arl", tmp_path, entities=entity_file(tmp_path))
    assert model.name == "arl"
    assert (model.config.entity_heads, model.config.graph_heads, model.config.graph.names) == (
        1,
        HEADS,
        6,
    )
    vectors = published_graph(file)
    torch.testing.assert_close(model.align_head.graph(), vectors, **NEAR)
    pixels = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    ids, mask = texts()
    entity_BN = torch.tensor([[4, 0], [2, -1], [-1, -1]])
    mention_BT = torch.full_like(ids, -1)
    mention_BT[0, [2, 3, 5]], mention_BT[1, 1] = torch.tensor([0, 0, 1]), 0
    plain = DualStreamModel.text_tokens(model, ids, mask)
    image, text = (
        model.image_tokens(pixels),
        model.align_head.attach(plain, LinkedEntities(entity_BN, mention_BT), None),
    )
    fused = model.fuse(text, image)

    types = file["modality_type_embeddings.weight"]
    t, v = plain.states_BND + types[0], image.states_BND + types[1]
    scores = model.score_entities(image, plain)
    for score, states, side in zip(scores, (v, t), ("img", "txt"), strict=True):
        hidden = F.relu(linear(states[:, 0], file, f"align_head.{side}_linear1"))
        expected = F.relu(linear(hidden, file, f"align_head.{side}_linear2")) @ vectors.T
        torch.testing.assert_close(score, expected, **NEAR)
    z = vectors[entity_BN.clamp(min=0)] * (entity_BN >= 0)[..., None]
    places = (mention_BT[:, None] == torch.arange(2)[:, None]).float()
    entity_hidden = (entity_BN < 0)[:, None] & (entity_BN >= 0).any(1)[:, None, None]
    for layer in range(LAYERS):
        name = f"multi_modal_language_layers.{layer}."
        new_v = cross_layer(v, t, file, f"multi_modal_vision_layers.{layer}.", None, ~mask[:, None])
        (t, z), v = (
            knowledge_layer(t, v, z, file, name, ~mask[:, None], places, entity_hidden),
            new_v,
        )
    torch.testing.assert_close(fused.image.states_BND, v, **NEAR)
    outside = mask & (mention_BT < 0)
    torch.testing.assert_close(fused.text.states_BND[outside], t[outside], **NEAR)
    pooled = [
        torch.tanh(linear(states[:, 0], file, f"multi_modal_{side}_pooler.dense"))
        for side, states in (("language", t), ("vision", v))
    ]
    matched = linear(torch.cat(pooled, -1), file, "itm_head.fc")
    torch.testing.assert_close(model.itm_head(fused.pooled_BD), matched, **NEAR)
    assert (text.entities.states_BND - z).abs().max() > 0.1  # entities are not constant


def test_names_of_entities_are_found_in_texts_also_after_loading(tmp_path: Path) -> None:
    model = imported(
        arl_file(), "arl", tmp_path, entities=entity_file(tmp_path), out=tmp_path / "out"
    )
    loaded: Any = medvl.load(tmp_path / "out")
    for each in (model, loaded):
        found = each.inputs.entities.find(
            "The central line ends at the heart. Small pleural effusion."
        )
        assert [mention.entity for mention in found] == [4, 2, 0]
    edges = set(map(tuple, loaded.align_head.graph.edges_2M.T.tolist()))
    assert edges == set(map(tuple, EDGES.T.tolist())) | {
        (number, number) for number in range(len(NAMES))
    }
    assert loaded.align_head.graph.edges_2M.shape == (2, EDGES.shape[1] - 1 + len(NAMES))


@pytest.mark.parametrize(
    "names", [("lin.weight", "att_src", "att_dst"), ("lin_l.weight", "att_l", "att_r")]
)
def test_names_of_other_versions_of_torch_geometric_are_known(
    names: tuple[str, str, str], tmp_path: Path
) -> None:
    first = arl_file()
    second = {key: tensor for key, tensor in first.items() if "lin_dst" not in key}
    for old, new in zip(("lin_src.weight", "att_src", "att_dst"), names, strict=True):
        second = {key.replace(old, new): tensor for key, tensor in second.items()}
    states = [
        imported(file, "arl", tmp_path, entities=entity_file(tmp_path)).state_dict()
        for file in (first, second)
    ]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_arl_without_its_entities_is_refused_and_its_encoders_are_imported(tmp_path: Path) -> None:
    file = arl_file()
    with raises(
        ConfigError, "missing", "entities", names="arl_encoders imports the image and text encoders"
    ):
        imported(file, "arl", tmp_path)
    with raises(ConfigError, "mismatch", "entities"):
        imported(file, "arl", tmp_path, entities=entity_file(tmp_path, NAMES[1:]))
    (tmp_path / "entity2id.txt").write_text("1\nC0000000 0 lung\n")
    with raises(ConfigError, "malformed", "entities"):
        import_checkpoint("arl", tmp_path / "file.ckpt", entities=tmp_path / "entity2id.txt")
    with raises(ConfigError, "not_found", "entities"):
        import_checkpoint("arl", tmp_path / "file.ckpt", entities=tmp_path / "none.txt")
    whole = imported(file, "arl", tmp_path, entities=entity_file(tmp_path)).state_dict()
    encoders = imported(file, "arl_encoders", tmp_path).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in encoders.items())


@pytest.mark.parametrize(
    "change", [{"align_head.edge_index": EDGES[0]}, {"align_head.conv1.att_src": torch.ones(3)}]
)
def test_malformed_graphs_are_refused(change: Tensors, tmp_path: Path) -> None:
    with raises(WeightsError, "mismatch"):
        imported({**arl_file(), **change}, "arl", tmp_path, entities=entity_file(tmp_path))
    edges = torch.tensor([[0, 9], [1, 1]])
    with raises(WeightsError, "mismatch", names="align_head.edge_index"):
        imported(
            {**arl_file(), "align_head.edge_index": edges},
            "arl",
            tmp_path,
            entities=entity_file(tmp_path),
        )
