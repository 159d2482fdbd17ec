"""Batches and tiny models that the tests of fusion-encoders share."""

import atexit
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import medvl
from helpers.model_copies import created_once
from medvl.data import KnowledgeGraph, TransEConfig, save_embeddings, write_knowledge
from medvl.data.knowledge.transe import TransE
from medvl.data.loading.collate import add_altered, alter_texts
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.schema import Batch, Inputs

TEXTS = (
    "There is a small left effusion.",
    "No pneumothorax.",
    "The heart is mildly enlarged and the lungs are clear.",
    "Dense consolidation of the right lower lobe.",
)
SIDE = 64
_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_ENCODERS: dict[str, Any] = {
    "text_encoder": "tiny_bert",
    "text_arguments": _TEXT,
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 2},
    "image_size": SIDE,
}
_SHALLOW: dict[str, Any] = {
    **_ENCODERS,
    "text_arguments": {**_TEXT, "num_hidden_layers": 1},
    "image_arguments": {"depth": 1},
}
"""Encoders below layers that fuse their features."""
_STREAM: dict[str, Any] = {**_SHALLOW, "width": 24, "layers": 2, "heads": 2, "intermediate": 48}
_DECODER: dict[str, Any] = {"decoder_width": 16, "decoder_heads": 2, "decoder_layers": 1}
_ALBEF: dict[str, Any] = {
    "layers": 2,
    "heads": 2,
    "intermediate": 64,
    "projection_dim": 16,
    "queue_size": 32,
    "ramp_steps": 4,
    "temperature": 0.5,
}
_CELLS: dict[str, Any] = {**_ENCODERS, "image_encoder": "resnet_tiny", "image_arguments": {}}
_KNOWLEDGE: dict[str, Any] = {
    "entity_width": 8,
    "entity_heads": 2,
    "entity_intermediate": 16,
    "graph_heads": 2,
    "graph_head_width": 4,
}
ENTITIES = (
    "effusion",
    "pneumothorax",
    "heart",
    "lungs",
    "right lower lobe",
    "consolidation",
    "mass",
    "device",
)
"""Names of the entities of `knowledge_folder`; the texts mention the first six."""
TINY: dict[str, dict[str, Any]] = {
    "dual_stream": _STREAM,
    "single_stream": _STREAM,
    "m3ae": {**_STREAM, **_DECODER, "mim_layer": 1},
    "albef": {**_SHALLOW, **_ALBEF},
    "arl": {**_STREAM, **_DECODER, **_KNOWLEDGE, "mim_layer": 1},
    "m2i2": {**_SHALLOW, **_ALBEF, **_DECODER, "mask_ratio": 0.5},
    "mumc": {**_SHALLOW, **_ALBEF, "mask_ratio": 0.5},
    "lxmert": {**_CELLS, "image_layers": 1, "layers": 2, "heads": 2, "intermediate": 64},
    "berthop": {
        **_ENCODERS,
        "image_encoder": "pixelhop",
        "image_arguments": {
            "nodes": (4, 6),
            "intermediate": (2, 0),
            "tokens": 5,
            "token_dim": 8,
            "cells": 4,
            "window": 3,
        },
    },
    "ptunifier": {
        **_STREAM,
        **_ENCODERS,  # of fewer layers the vectors are alike
        "layers": 4,
        "prompts": 12,
        "image_prompts": 5,
        "text_prompts": 4,
    },
    "mixed": {**_STREAM, "scales": (1, 2)},
    "medvill": {
        **_ENCODERS,
        "image_encoder": "resnet_tiny",
        "image_arguments": {},
        "frozen_image_layers": 0,
    },
    "pixelbert": _CELLS,
    "uniter": {**_CELLS, "task_mix": False},
    "vilt": {**_ENCODERS, "text_arguments": {**_TEXT, "hidden_size": 64, "num_hidden_layers": 0}},
    "visualbert": _CELLS,
}
"""Every fusion system, small enough for a step in milliseconds."""


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return train_wordpiece(list(TEXTS), vocab_size=200, min_frequency=1)


def tiny_model(
    name: str, tokenizer: Tokenizer | None, seed: int = 0, **settings: Any
) -> FusionModel:
    if name == "arl":
        knowledge_folder()  # before the seed, which it sets as well when it is first called
    torch.manual_seed(seed)
    model = created_once(_created, name, tokenizer, shared=tokenizer, **settings)
    assert isinstance(model, FusionModel)
    return model


def _created(name: str, tokenizer: Tokenizer | None, **settings: Any) -> Any:
    if name == "arl" and "graph" not in settings:
        settings.setdefault("knowledge", knowledge_folder())
    return medvl.create_model(name, tokenizer=tokenizer, **{**TINY[name], **settings})


@functools.cache
def knowledge_folder() -> str:
    """Return a folder with a small knowledge graph, removed at exit: the last entity has no
    relation.
    """
    folder = tempfile.TemporaryDirectory(prefix="medvl-knowledge-")
    atexit.register(folder.cleanup)
    triples = [
        (0, 0, 3),
        (1, 0, 3),
        (5, 0, 4),
        (4, 1, 3),
        (3, 2, 4),
        (5, 0, 3),
        (6, 0, 3),
        (2, 1, 3),
        (5, 3, 3),
    ]
    graph = KnowledgeGraph(
        identifiers=[f"C{number:07d}" for number in range(len(ENTITIES))],
        names=[[name] for name in ENTITIES],
        relations=["has_finding_site", "has_part", "part_of", "seen_in"],
        triples_N3=np.array(triples),
    )
    graph = write_knowledge(graph, Path(folder.name))
    torch.manual_seed(0)
    save_embeddings(TransE(len(ENTITIES), 4, 8), graph, TransEConfig(dim=8), Path(folder.name))
    return folder.name


def shaken(model: Any, scale: float = 0.4) -> Any:
    """Return the model with random weights far from their initial values, so that outputs depend
    on inputs.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def make_batch(
    tokenizer: Tokenizer, size: int = 6, texts: Sequence[str] = TEXTS, **fields: Any
) -> Batch:
    chosen = [texts[number % len(texts)] for number in range(size)]
    ids_BT, mask_BT = tokenizer(chosen)
    generator = torch.Generator().manual_seed(1)
    batch = Batch(
        keys=[str(number) for number in range(size)],
        image_BCHW=torch.randint(
            0, 256, (size, 1, SIDE, SIDE), dtype=torch.uint8, generator=generator
        ),
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.zeros(size, 0),
        texts=chosen,
    )
    return dataclasses.replace(batch, **fields)


def with_altered_texts(batch: Batch, tokenizer: Tokenizer) -> Batch:
    """Return the batch with mirrored and denied texts, as a loader makes it."""
    altered = alter_texts(batch.texts, Inputs(mirrored_text=True, denied_text=True))
    ids_NT, mask_NT = tokenizer([*batch.texts, *itertools.chain(*altered.values())])
    size = len(batch)
    batch = dataclasses.replace(batch, ids_BT=ids_NT[:size], mask_BT=mask_NT[:size])
    add_altered(batch, altered, ids_NT[size:], mask_NT[size:])
    batch.found_BL = (batch.turned_BL > 0).to(torch.int8)  # of reports of these texts alone
    return batch


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)
