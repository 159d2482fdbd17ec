"""Export of language models with their heads, as a folder for transformers' `AutoModelForMaskedLM`."""

from pathlib import Path
from typing import Any

import torch

from medvl.common.folders import new_folder
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, save_text_model, write_card
from medvl.export.importers.key_map import KeyRule, to_published
from medvl.export.importers.language import (
    ALBERT_PAIRS,
    ALBERT_WORDS,
    BERT_PAIRS,
    BERT_WORDS,
    ROBERTA_WORDS,
    backbone_rules,
)
from medvl.models.language.base import LanguageModel

_HEADS: dict[str, tuple[str, tuple[KeyRule, ...], str, tuple[KeyRule, ...]]] = {
    "bert": ("BertForMaskedLM", BERT_WORDS, "BertForPreTraining", BERT_PAIRS),
    "albert": ("AlbertForMaskedLM", ALBERT_WORDS, "AlbertForPreTraining", ALBERT_PAIRS),
    "roberta": ("RobertaForMaskedLM", ROBERTA_WORDS, "", ()),
}
"""Model type -> class with the word head, its rules, class with both heads, rules of the head for pairs."""
_USAGE = """from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
model, tokenizer = AutoModelForMaskedLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
encoder = AutoModel.from_pretrained("FOLDER", add_pooling_layer=False)    # without the head"""


def export_language_model(model: LanguageModel, out: Path | str) -> Exported:
    """Write encoder, heads and tokenizer, load them again and compare the scores with medvl's.

    The dropout of the attention is the architecture's default, also where the model was trained with another.
    A model with a task on pairs becomes a `BertForPreTraining` or `AlbertForPreTraining`, whose word head
    `AutoModelForMaskedLM` loads too.

    Raises:
        ConfigError: transformers has no class for this encoder with these heads.
        CheckpointError: the scores differ.
    """
    import transformers

    model.eval()
    net: Any = _build(model)
    with new_folder(Path(out)) as folder, torch.no_grad():
        save_text_model(model, net, folder)
        if model.tokenizer is not None:
            model.tokenizer.save(folder, token_types=getattr(net.config, "type_vocab_size", 1) > 1)
        ids = random_ids(model.text_encoder, None)
        mask = torch.ones_like(ids, dtype=torch.bool)
        states_BTD = model.text_encoder(ids, mask).tokens_BTD
        options = {"input_ids": ids, "attention_mask": mask.long()}
        words = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()(**options).logits
        differences = {"word scores": difference("the word scores", words, model.score_words(states_BTD))}
        if model.pair_head is not None:
            both = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()(**options)
            pairs = both.sop_logits if net.config.model_type == "albert" else both.seq_relationship_logits
            differences["pair scores"] = difference("the pair scores", pairs, model.score_pairs(states_BTD[:, 0]))
        write_card(folder, model, usage=_USAGE, left_out={}, library="transformers")
    return Exported(folder=Path(out), differences=differences, left_out={})


def _build(model: LanguageModel) -> Any:
    """Return transformers' model with the same weights. Raises ConfigError where it has none."""
    import transformers

    config: Any = model.text_encoder.backbone.config
    words, word_rules, both, pair_rules = _HEADS.get(config.model_type, ("", (), "", ()))
    name = words if model.pair_head is None else both
    if not name:
        task = "" if model.pair_head is None else " with a task on pairs"
        message = f"transformers has no class for a {config.model_type}{task}; export a system that it starts"
        raise ConfigError(message, "unsupported", field="text_encoder")
    net: Any = getattr(transformers, name)(type(config).from_dict(config.to_dict()))
    renamed, unknown = to_published(model.state_dict(), (*pair_rules, *word_rules, *backbone_rules(config.model_type)))
    assert not unknown, unknown
    table = next(name for name in renamed if name.endswith("word_embeddings.weight"))
    bias = next(rule.source for rule in word_rules if rule.target == "word_head.bias")
    tied = {f"{bias.removesuffix('bias')}decoder.weight": table, f"{bias.removesuffix('bias')}decoder.bias": bias}
    net.load_state_dict({key: renamed[tied.get(key, key)] for key in net.state_dict()})
    return net
