"""Key tables of systems with knowledge or masked records: ARL and MRM."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medvl.common.files import sha256
from medvl.common.text_files import read_text
from medvl.data.knowledge.finder import EntityFinder
from medvl.errors import ConfigError, WeightsError
from medvl.export.importers.backbones import TEXT, bert, tied_word_head, vision_transformer
from medvl.export.importers.fusion_encoders import (
    DECODER_POSITIONS,
    bert_attention,
    bert_feed_forward,
    keep_decoder_positions,
    m3ae_fields,
    m3ae_streams,
    pixel_decoder,
)
from medvl.export.importers.importer import (
    EntityFile,
    Importer,
    attention_heads,
    bert_fields,
    count,
)
from medvl.export.importers.key_map import KeyRule, Shapes, drop, keep, same
from medvl.models.fusion_encoders.arl import ARLConfig
from medvl.models.fusion_encoders.mrm import MRMConfig
from medvl.models.fusion_encoders.parts.knowledge import GraphSizes

# Key table of ARL: M3AE's, with layers for entities and a knowledge graph, whose names are in a
# file of their own.

_LAYERS = 6
_MAX_BYTES = 1 << 28
_GRAPH = "align_head.graph."
_TEXT_LAYERS = "multi_modal_language_layers"
_EDGES = f"{_GRAPH}edges_2M"


def _arl(shapes: Shapes) -> ARLConfig:
    entities, width = shapes[f"{_GRAPH}vectors"]
    heads, head_width = shapes[f"{_GRAPH}first.source"]
    edges = shapes[_EDGES][1]
    return ARLConfig(
        **m3ae_fields(shapes),
        graph=GraphSizes(
            entities=entities, triples=edges - entities, names=0, longest_name=0, sha256=""
        ),
        entity_width=width,
        entity_heads=attention_heads(width),
        entity_intermediate=shapes["fusion.text_layers.0.entities.feed_forward.inner.weight"][0],
        graph_heads=heads,
        graph_head_width=head_width,
    )


def with_own_edges(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the edges (2, M) with one of every entity to itself, as torch_geometric's GATConv adds
    them.

    Raises WeightsError for edges of entities that are not there.
    """
    edges_2M = tensors.get(_EDGES)
    vectors = tensors.get(f"{_GRAPH}vectors")
    if edges_2M is None or vectors is None or edges_2M.ndim != 2 or len(edges_2M) != 2:
        return {}
    if not edges_2M.is_meta:
        if edges_2M.is_floating_point() or not ((edges_2M >= 0) & (edges_2M < len(vectors))).all():
            raise WeightsError(
                f"align_head.edge_index: expected numbers of {len(vectors)} entities", "mismatch"
            )
        edges_2M = edges_2M[:, edges_2M[0] != edges_2M[1]]
    own_2V = torch.arange(len(vectors), device=edges_2M.device).expand(2, -1)
    return {_EDGES: torch.cat([edges_2M, own_2V], dim=1)}


def with_names(config: Any, path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return ARL's config with the sizes of the names of `entity2id.txt`, and their tensors.

    Each line but the first has an identifier, a number, a name, and any further names, separated by
    tabs.

    Raises ConfigError when it cannot be read, or its entities are not those of the checkpoint.
    """
    what = "entity2id.txt"
    lines = read_text(path, ConfigError, field="entities", limit=_MAX_BYTES, what=what).split("\n")[
        1:
    ]
    try:
        rows = [line.split("\t") for line in lines if line.strip()]
        names = [(name, int(number)) for _, number, first, *more in rows for name in (first, *more)]
    except ValueError:
        message = f"{path}: expected lines of identifier, number and name with tabs between them"
        raise ConfigError(message, "malformed", field="entities") from None
    if sorted(int(row[1]) for row in rows) != list(range(config.graph.entities)):
        message = (
            f"{path}: expected the numbers of the checkpoint's {config.graph.entities} "
            f"entities, each once"
        )
        raise ConfigError(message, "mismatch", field="entities")
    finder = EntityFinder.of(names)
    sizes = dataclasses.replace(
        config.graph, names=len(finder), longest_name=finder.longest, sha256=sha256(path)
    )
    tensors = {
        f"{_GRAPH}name_hash_N": torch.from_numpy(finder.hash_N.view(np.int64)),
        f"{_GRAPH}name_entity_N": torch.from_numpy(finder.entity_N),
    }
    return dataclasses.replace(config, graph=sizes), tensors


def _graph_attention(source: str, target: str) -> list[KeyRule]:
    """Return the rules of a GATConv, whose names depend on the version of torch_geometric."""
    return [
        same(f"{source}.lin_dst.weight", f"{source}.lin_src.weight"),
        same(f"{source}.lin_r.weight", f"{source}.lin_l.weight"),
        *(
            keep(f"{source}.{name}.weight", f"{target}.project.weight")
            for name in ("lin", "lin_src", "lin_l")
        ),
        *(
            keep(f"{source}.{name}", f"{target}.source", change="drop axis")
            for name in ("att_src", "att_l")
        ),
        *(
            keep(f"{source}.{name}", f"{target}.target", change="drop axis")
            for name in ("att_dst", "att_r")
        ),
        keep(f"{source}.bias", f"{target}.bias"),
    ]


def _entity_layers() -> list[KeyRule]:
    """Return the rules of the entities' stream; parts that no later layer reads are dropped."""
    last = _LAYERS - 1
    layer = f"{_TEXT_LAYERS}.*"
    entities = "fusion.text_layers.*.entities"
    feed_forward = "knowledge_intermediate", "knowledge_output"
    unread = (
        "knowledge_attention",
        "knowledge_crossattention",
        "image2knowledge",
        "knowledge2text",
        *feed_forward,
    )
    no_reader = "entities of the last layer, which neither the pooled token nor a masked word reads"
    return [
        *(drop(f"{_TEXT_LAYERS}.{last}.{name}.**", no_reader) for name in unread),
        *(
            drop(f"{_TEXT_LAYERS}.{last - 1}.{name}.**", f"input of the {no_reader}")
            for name in feed_forward
        ),
        *bert_attention(f"{layer}.knowledge_attention", f"{entities}.attention"),
        *bert_attention(f"{layer}.knowledge_crossattention", f"{entities}.cross_attention"),
        *bert_feed_forward(
            f"{layer}.{feed_forward[0]}", f"{layer}.{feed_forward[1]}", f"{entities}.feed_forward"
        ),
        keep(f"{layer}.image2knowledge.*", f"{entities}.from_image.*"),
        keep(f"{layer}.knowledge2text.*", f"{entities}.to_text.*"),
        keep(f"{layer}.knowledge_fusion_output.dense.*", "fusion.text_layers.*.merge.*"),
        keep(f"{layer}.knowledge_fusion_output.LayerNorm.*", "fusion.text_layers.*.merge_norm.*"),
    ]


KNOWLEDGE_IMPORTERS = (
    Importer(
        name="arl",
        title="ARL (Chen et al. 2022): M3AE's streams with a knowledge graph; its entities' "
        "names from a second file",
        source="zhjohnchan/ARL @ 527fe06",
        table=(
            *_entity_layers(),
            *m3ae_streams("fusion.text_layers.*.text"),
            *pixel_decoder(),
            keep("align_head.edge_index", _EDGES),
            keep("align_head.x", f"{_GRAPH}vectors"),
            keep("align_head.embedding_ln.*", f"{_GRAPH}norm.*"),
            *_graph_attention("align_head.conv1", f"{_GRAPH}first"),
            *_graph_attention("align_head.conv2", f"{_GRAPH}second"),
            *(
                keep(
                    f"align_head.{source}_linear{number}.*",
                    f"align_head.{target}.{2 * (number - 1)}.*",
                )
                for source, target in (("img", "image"), ("txt", "text"))
                for number in (1, 2)
            ),
        ),
        images={"resize": "bicubic_antialias"},
        system=_arl,
        computed=with_own_edges,
        settle=keep_decoder_positions,
        entities=EntityFile(
            title="entity2id.txt of its data/knowledge", read=with_names, required=True
        ),
        note="Its authors publish no weights: this is for files of their code, which links "
        "texts to UMLS by scispaCy. "
        "Here the names of the file of entities are looked up: add synonyms to its lines, with "
        "tabs between them. A "
        "model of other than six layers is refused.",
    ),
)


# Key table of MRM, whose file has its encoders, its decoder of pixels and its head for masked
# words.

_BERT = "bert_encoder.model."


def _mrm(shapes: Shapes) -> MRMConfig:
    fields = bert_fields(shapes, "bert")
    values = shapes["mim_head.pixels.weight"][0]
    patch = fields["image_arguments"].get("patch_size", 16)
    return MRMConfig(
        **fields,
        target_scale=round((values / (3 * patch**2)) ** 0.5),
        max_tokens=shapes[f"{TEXT}embeddings.position_embeddings.weight"][0],
        decoder_width=shapes["mim_head.mask_token"][0],
        decoder_layers=count(shapes, "mim_head.blocks."),
    )


IMPORTERS = (
    Importer(
        name="mrm",
        title="MRM (Zhou et al. 2023): ViT-B/16 at 224 pixels, a BERT of six layers",
        source="RL4M/MRM-pytorch @ e2f458e and yangzhou12/BenchX @ b874fa6",
        table=(
            *vision_transformer(""),
            *bert(f"{_BERT}bert."),
            *tied_word_head(
                f"{_BERT}cls.predictions", f"{_BERT}bert.embeddings.word_embeddings.weight"
            ),
            keep("bert_mlp.*", "image_to_words.*"),
            keep("mask_token", "mim_head.mask_token", change="flatten"),
            keep("decoder_pos_embed", DECODER_POSITIONS, change="drop axis"),
            keep("decoder_embed.*", "mim_head.embed.*"),
            keep("decoder_blocks.**", "mim_head.blocks.**"),
            keep("decoder_norm.*", "mim_head.norm.*"),
            keep("decoder_pred.*", "mim_head.pixels.*"),
        ),
        system=_mrm,
        images={"shrink_antialias": False},
        settle=keep_decoder_positions,
        note="Its ViT was trained with fixed positions, which are in the file; further training "
        "changes them.",
    ),
)
