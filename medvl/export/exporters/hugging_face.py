"""Export to transformers: folders that `AutoModel.from_pretrained` loads without custom code.

A CLIP on open_clip's own encoders becomes one `CLIPModel`; a CLIP or SigLIP on the towers of
transformers becomes what it was imported from. Of other systems each encoder is
exported: as a class of transformers that computes the same, else timm's models as
`TimmWrapperModel`, else in medvl's format, which `medvl.export.load_encoder` reads. The heads of
dual-encoders lie beside them with a loader, `zero_shot.py`. Other parts, such as fusion-encoders,
are left out, and the card lists them.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from medvl.common.files import new_folder
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.image.encoder import ImageOptions
from medvl.encoders.presets import IMAGE_PRESETS
from medvl.encoders.text.adapters import MatrixHead
from medvl.errors import CheckpointError, ConfigError
from medvl.export.exporters.common import (
    Exported,
    difference,
    random_ids,
    random_pixels,
    require_encoders,
    save_text_model,
    write_card,
    write_heads,
)
from medvl.export.exporters.towers import (
    full_length,
    is_pair,
    text_tower,
    write_image_tower,
    write_pair,
)
from medvl.export.importers import backbones
from medvl.export.importers.backbones import IMAGE, TEXT_PROJECTION
from medvl.export.importers.import_checkpoint import load_encoder, save_encoder
from medvl.export.importers.key_map import KeyRule, keep, to_published
from medvl.export.importers.language import (
    ALBERT_PAIRS,
    ALBERT_WORDS,
    BERT_PAIRS,
    BERT_WORDS,
    ROBERTA_WORDS,
    backbone_rules,
)
from medvl.models.base import System
from medvl.models.dual_encoders.clip import CLIP
from medvl.models.language.base import LanguageModel
from medvl.models.language.kebert import KEBERT

# Export of language models with their heads, as a folder for transformers'
# `AutoModelForMaskedLM`.

_HEADS: dict[str, tuple[str, tuple[KeyRule, ...], str, tuple[KeyRule, ...]]] = {
    "bert": ("BertForMaskedLM", BERT_WORDS, "BertForPreTraining", BERT_PAIRS),
    "albert": ("AlbertForMaskedLM", ALBERT_WORDS, "AlbertForPreTraining", ALBERT_PAIRS),
    "roberta": ("RobertaForMaskedLM", ROBERTA_WORDS, "", ()),
}
"""Model type -> class with the word head, its rules, class with both heads, rules of the head
for pairs.
"""
_USAGE = """from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
encoder = AutoModel.from_pretrained("FOLDER", add_pooling_layer=False)    # without the head"""


def export_language_model(model: LanguageModel, out: Path | str) -> Exported:
    """Write encoder, heads and tokenizer, load them again and compare the scores with medvl's.

    The dropout of the attention is the architecture's default, also where the model was trained
    with another. A model with a task on pairs becomes a `BertForPreTraining` or
    `AlbertForPreTraining`, whose word head `AutoModelForMaskedLM` loads too.

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
        differences = {
            "word scores": difference("the word scores", words, model.score_words(states_BTD))
        }
        if model.pair_head is not None:
            both = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()(**options)
            pairs = (
                both.sop_logits
                if net.config.model_type == "albert"
                else both.seq_relationship_logits
            )
            differences["pair scores"] = difference(
                "the pair scores", pairs, model.score_pairs(states_BTD[:, 0])
            )
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
        message = (
            f"transformers has no class for a {config.model_type}{task}; export a system "
            f"that it starts"
        )
        raise ConfigError(message, "unsupported", field="text_encoder")
    net: Any = getattr(transformers, name)(type(config).from_dict(config.to_dict()))
    renamed, unknown = to_published(
        model.state_dict(), (*pair_rules, *word_rules, *backbone_rules(config.model_type))
    )
    assert not unknown, unknown
    table = next(name for name in renamed if name.endswith("word_embeddings.weight"))
    bias = next(rule.source for rule in word_rules if rule.target == "word_head.bias")
    tied = {
        f"{bias.removesuffix('bias')}decoder.weight": table,
        f"{bias.removesuffix('bias')}decoder.bias": bias,
    }
    net.load_state_dict({key: renamed[tied.get(key, key)] for key in net.state_dict()})
    return net


_HIGHEST_ID_IS_END = 2  # transformers' code for "the end token is the one of the highest id"
_ENCODERS = ("image_encoder", "text_encoder")
_HEAD = "text_head.safetensors"
_PROJ = "proj"  # CLIP's projection of an image, inside open_clip's module
_NO_CLASS = (
    "transformers has no class with this part; medvl's ONNX export holds it if inference needs it"
)

Arguments = Mapping[str, Any] | None
"""Arguments of `AutoModel.from_pretrained` for an encoder; None for one in medvl's format."""


def export_hugging_face(model: System, out: Path | str) -> Exported:
    """Write a complete CLIP, or a model's encoders with the heads for zero-shot classification, and
    a card.

    Everything is loaded again, and the outputs are compared with medvl's before the folder is kept.

    Args:
        model: any system with an image and a text encoder, a language model, or KAD's knowledge
            encoder.
        out: new folder of a `CLIPModel`, of a model for `AutoModelForMaskedLM`, or with
            `image_encoder` and `text_encoder` in it.

    Raises:
        ConfigError: the model does not have both encoders.
        CheckpointError: the outputs differ.
    """
    if isinstance(model, LanguageModel):
        return export_language_model(model, out)
    if isinstance(model, KEBERT):
        return _export_knowledge_encoder(model, Path(out))
    model, encoder = require_encoders(model)
    model.eval()
    with new_folder(Path(out)) as folder, torch.no_grad():
        if is_pair(model):
            differences, left_out, usage = write_pair(model, folder)
        elif _is_plain_clip_model(model):
            differences = _write_clip(model, folder)
            left_out = {}
            if model.tokenizer is not None:
                model.tokenizer.save(folder)
            usage = (
                'from transformers import AutoModel\nmodel = AutoModel.from_pretrained("FOLDER")'
            )
        else:
            image_differences, image = _write_image(encoder, folder / "image_encoder")
            text_differences, text = _write_text(model, folder / "text_encoder")
            if model.tokenizer is not None:
                model.tokenizer.save(folder / "text_encoder")
            heads = write_heads(model, folder, {"image": image, "text": text})
            differences = {**image_differences, **text_differences, **heads}
            left_out = _left_out(model, bool(heads))
            usage = _usage({"image": image, "text": text}, bool(heads))
        write_card(folder, model, usage=usage, left_out=left_out, library="transformers")
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _export_knowledge_encoder(model: KEBERT, out: Path) -> Exported:
    """Write the text encoder, the weights of its head and a card that has the head's layers."""
    model.eval()
    with new_folder(out) as folder, torch.no_grad():
        differences, arguments = _write_text(model, folder / "text_encoder")
        if model.tokenizer is not None:
            model.tokenizer.save(folder / "text_encoder")
        save_file(
            {name: tensor.contiguous() for name, tensor in model.text_head.state_dict().items()},
            folder / _HEAD,
        )
        layers = ", ".join(f"nn.{layer}" for layer in model.text_head.children())
        usage = [
            *_usage({"text": arguments}, heads=False).splitlines(),
            "",
            "# An embedding is the head's output for the state of the first token, divided by "
            "its length:",
            "from safetensors.torch import load_file",
            "from torch import nn",
            f"head = nn.Sequential({layers})",
            f'head.load_state_dict(load_file("FOLDER/{_HEAD}"))',
        ]
        write_card(folder, model, usage="\n".join(usage), left_out={}, library="transformers")
    return Exported(folder=out, differences=differences, left_out={})


def _usage(arguments: Mapping[str, Arguments], heads: bool) -> str:
    lines = []
    if any(each is not None for each in arguments.values()):
        lines.append("from transformers import AutoModel")
    if any(each is None for each in arguments.values()):
        lines.append("from medvl.export import load_encoder")
    for side, each in arguments.items():
        options = "".join(f", {name}={value}" for name, value in (each or {}).items())
        call = "load_encoder" if each is None else "AutoModel.from_pretrained"
        lines.append(f'{side}_encoder = {call}("FOLDER/{side}_encoder"{options})')
    if heads:
        lines += [
            "",
            "# Both with their heads, run in FOLDER:",
            "from zero_shot import load",
            "model = load()",
            "similarity_NM = model.encode_image(pixels_NCHW) @ model.encode_text(texts).T",
        ]
    return "\n".join(lines)


def _left_out(model: Any, heads: bool) -> dict[str, str]:
    """Return the parts that were not written, with the reason; `heads`: the heads of a
    dual-encoder were.
    """
    written = (*_ENCODERS, "image_head", "text_head") if heads else _ENCODERS
    parts = [
        name
        for name, child in model.named_children()
        if name not in written and _has_parameters(child)
    ]
    if not heads and _has_parameters(model.text_encoder.projection):
        parts.append("text_encoder.projection")
    if not heads and getattr(model.image_encoder.backbone, _PROJ, None) is not None:
        parts.append(f"{IMAGE}{_PROJ}")
    return dict.fromkeys(parts, _NO_CLASS)


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _load_tensors(
    net: Any, tensors: Mapping[str, Tensor], table: Sequence[KeyRule], name: str
) -> None:
    """Load medvl's tensors into transformers' module. Raises ConfigError if names or shapes
    differ.
    """
    renamed, unknown = to_published(tensors, table)
    state = net.state_dict()
    missing = [key for key in state if key not in renamed]
    shapes = [
        key for key, tensor in renamed.items() if key in state and state[key].shape != tensor.shape
    ]
    differing = [*unknown, *(key for key in renamed if key not in state), *missing, *shapes]
    if differing:
        message = (
            f"{type(net).__name__} of transformers does not compute what {name} does: "
            f"{differing[0]}"
        )
        raise ConfigError(message, "unsupported")
    net.load_state_dict(renamed)


def _write_image(encoder: ImageEncoder, folder: Path) -> tuple[dict[str, float], Arguments]:
    """Write the encoder in the first format that computes the same; return its differences and
    loading arguments.
    """
    for write in (write_image_tower, _write_image_class, _write_timm):
        try:
            return write(encoder, folder)
        except (ConfigError, CheckpointError):
            shutil.rmtree(folder, ignore_errors=True)
    save_encoder(encoder, folder)
    pixels = random_pixels(encoder)
    actual = load_encoder(folder)(pixels)
    expected = encoder(pixels)
    return {
        "image vector": difference("the image vector", actual.pooled_BD, expected.pooled_BD)
    }, None


def _write_timm(encoder: ImageEncoder, folder: Path) -> tuple[dict[str, float], Arguments]:
    import transformers

    net: Any = encoder.backbone
    if not type(net).__module__.startswith("timm."):
        raise ConfigError(
            f"{encoder.name} is not a model of timm", "unsupported", field="image_encoder"
        )
    preset = IMAGE_PRESETS.get(encoder.name)
    options = {field.name for field in dataclasses.fields(ImageOptions)}
    arguments = dict(preset.arguments) if preset else {}
    arguments |= {name: value for name, value in encoder.config.items() if name not in options}
    if encoder.in_channels != 3:
        arguments["in_chans"] = encoder.in_channels
    if hasattr(net, "patch_embed"):
        arguments["img_size"] = encoder.image_size
    name = (preset.model if preset else encoder.name).removeprefix("timm:")
    config = transformers.TimmWrapperConfig(architecture=name, model_args=arguments)
    try:
        wrapper: Any = transformers.TimmWrapperModel(config)
        wrapper.timm_model.load_state_dict(net.state_dict())
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        message = f"timm builds {name} with other tensors: {error}"
        raise ConfigError(message, "unsupported", field="image_encoder") from error
    wrapper.save_pretrained(folder)
    reloaded = transformers.AutoModel.from_pretrained(folder).eval()
    pixels = random_pixels(encoder)
    actual = reloaded(pixels).last_hidden_state
    expected = net.forward_features(pixels)
    return {"image features": difference("the image features", actual, expected)}, {}


def _write_image_class(encoder: ImageEncoder, folder: Path) -> tuple[dict[str, float], Arguments]:
    import transformers

    net, table = _image_class(encoder)
    tensors = {
        f"{IMAGE}{name}": tensor
        for name, tensor in encoder.backbone.state_dict().items()
        if name != _PROJ
    }
    _load_tensors(net, tensors, table, encoder.name)
    net.save_pretrained(folder)
    arguments = _no_pooler(net)
    reloaded = transformers.AutoModel.from_pretrained(folder, **arguments).eval()
    pixels = random_pixels(encoder)
    states = reloaded(pixels).last_hidden_state
    features = encoder(pixels)
    if states.ndim == 4:
        states = states.flatten(2).transpose(1, 2)
    # regions come from an earlier stage, the pooled vector from the last
    if encoder.config["patch_level"] != -1:
        return {
            "image vector": difference("the image vector", states.mean(dim=1), features.pooled_BD)
        }, arguments
    expected = features.patches_BPD
    assert expected is not None, "every class here has regions"
    states = states[:, states.shape[1] - expected.shape[1] :]  # without the class token
    if type(net).__name__ == "CLIPVisionModel":
        parent = reloaded.vision_model if hasattr(reloaded, "vision_model") else reloaded
        states = parent.post_layernorm(states)
    return {"image regions": difference("the image regions", states, expected)}, arguments


def _image_class(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    builders: Mapping[str, Callable[[ImageEncoder], tuple[Any, Sequence[KeyRule]]]] = {
        "timm.models.resnet.ResNet": _resnet,
        "timm.models.vision_transformer.VisionTransformer": _vision_transformer,
        "open_clip.transformer.VisionTransformer": _clip_vision,
    }
    kind = f"{type(encoder.backbone).__module__}.{type(encoder.backbone).__name__}"
    if kind not in builders:
        message = (
            f"transformers has no class for {encoder.name} ({kind}), only for "
            f"{', '.join(builders)}; use ONNX"
        )
        raise ConfigError(message, "unsupported", field="image_encoder")
    return builders[kind](encoder)


def _resnet(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net: Any = encoder.backbone
    stages = [net.layer1, net.layer2, net.layer3, net.layer4]
    config = transformers.ResNetConfig(
        num_channels=encoder.in_channels,
        embedding_size=net.conv1.out_channels,
        hidden_sizes=[
            stage[-1].bn3.num_features if hasattr(stage[-1], "bn3") else stage[-1].bn2.num_features
            for stage in stages
        ],
        depths=[len(stage) for stage in stages],
        layer_type="bottleneck" if hasattr(stages[0][0], "conv3") else "basic",
    )
    return transformers.ResNetModel(config), backbones.hugging_face_resnet("")


def _vision_transformer(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net: Any = encoder.backbone
    block = net.blocks[0]
    config = transformers.ViTConfig(
        hidden_size=net.embed_dim,
        num_hidden_layers=len(net.blocks),
        num_attention_heads=block.attn.num_heads,
        intermediate_size=block.mlp.fc1.out_features,
        image_size=list(encoder.image_size),
        patch_size=list(net.patch_embed.patch_size),
        num_channels=encoder.in_channels,
        layer_norm_eps=net.norm.eps,
        hidden_act="gelu",
    )
    return transformers.ViTModel(config, add_pooling_layer=False), backbones.hugging_face_vit("")


def _clip_vision(encoder: ImageEncoder) -> tuple[Any, Sequence[KeyRule]]:
    import transformers

    net = transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**_clip_vision_fields(encoder))
    )
    return net, backbones.hugging_face_clip_image(
        "vision_model." if hasattr(net, "vision_model") else ""
    )


def _write_text(model: Any, folder: Path) -> tuple[dict[str, float], Arguments]:
    import transformers

    encoder: TextEncoder = model.text_encoder
    net: Any = encoder.backbone
    ids = random_ids(encoder, None)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(net, transformers.PreTrainedModel):
        if not _is_plain_clip(net, "TextTransformer"):
            save_encoder(encoder, folder)
            actual = load_encoder(folder)(ids, mask)
            reference = encoder(ids, mask)
            return {
                "text vector": difference("the text vector", actual.pooled_BD, reference.pooled_BD)
            }, None
        net = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**_clip_text_fields(encoder, _HIGHEST_ID_IS_END))
        )
        table = backbones.hugging_face_clip_text(
            "text_model." if hasattr(net, "text_model") else ""
        )
        tensors = {
            f"text_encoder.backbone.{name}": tensor
            for name, tensor in encoder.backbone.state_dict().items()
        }
        _load_tensors(net, tensors, table, encoder.name)
    net = text_tower(encoder) if net is encoder.backbone else net
    save_text_model(model, net, folder)
    arguments = _no_pooler(net)
    reloaded = transformers.AutoModel.from_pretrained(folder, **arguments).eval()
    whole = full_length(encoder, ids)
    masks = {"attention_mask": mask.long()} if whole.shape == mask.shape else {}
    states = reloaded(input_ids=whole, **masks).last_hidden_state
    expected = encoder.encode(encoder.embed(ids, mask), mask)[-1]
    return {"token states": difference("the token states", states, expected)}, arguments


def _no_pooler(net: Any) -> dict[str, bool]:
    """Return the argument that keeps `from_pretrained` from adding a random pooler, for classes
    that have one.
    """
    return {"add_pooling_layer": False} if hasattr(net, "pooler") and net.pooler is None else {}


def _is_plain_clip(net: Any, kind: str) -> bool:
    """Return whether one of open_clip's Transformers is OpenAI's, with nothing added."""
    if type(net).__name__ != kind or not type(net).__module__.startswith("open_clip."):
        return False
    causal = kind != "TextTransformer" or net.attn_mask is not None
    return (
        causal
        and getattr(net, "attn_pool", None) is None
        and not getattr(net, "final_ln_after_pool", False)
    )


def _is_plain_clip_model(model: System) -> bool:
    return (
        isinstance(model, CLIP)
        and not hasattr(model, "logit_bias")
        and _is_plain_clip(model.image_encoder.backbone, "VisionTransformer")
        and _is_plain_clip(model.text_encoder.backbone, "TextTransformer")
        and isinstance(model.text_encoder.projection, MatrixHead)
        and model.text_encoder.pool == "eos"
    )


def _write_clip(model: Any, folder: Path) -> dict[str, float]:
    import transformers

    tokenizer = model.tokenizer
    encoder = model.text_encoder
    end_id = encoder.vocab_size - 1 if tokenizer is None else tokenizer.sep_id
    config = transformers.CLIPConfig(
        vision_config=_clip_vision_fields(model.image_encoder),
        text_config=_clip_text_fields(encoder, end_id),
        projection_dim=encoder.feature_dim,
    )
    net = transformers.CLIPModel(config)
    table = [
        *backbones.hugging_face_clip_image("vision_model."),
        *backbones.hugging_face_clip_text("text_model."),
        keep("visual_projection.weight", f"{IMAGE}proj", change="transpose"),
        keep("text_projection.weight", f"{TEXT_PROJECTION}matrix", change="transpose"),
        keep("logit_scale", "logit_scale"),
    ]
    _load_tensors(net, model.state_dict(), table, model.name)
    net.save_pretrained(folder)
    reloaded = transformers.AutoModel.from_pretrained(folder).eval()
    pixels = random_pixels(model.image_encoder)
    ids = random_ids(encoder, end_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    output = reloaded(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels)
    return {
        "image embedding": difference(
            "the image embedding", output.image_embeds, model.encode_image(pixels)
        ),
        "text embedding": difference(
            "the text embedding", output.text_embeds, model.encode_text(ids, mask)
        ),
    }


def _clip_vision_fields(encoder: ImageEncoder) -> dict[str, Any]:
    net: Any = encoder.backbone
    if (
        not _is_plain_clip(net, "VisionTransformer")
        or encoder.image_size[0] != encoder.image_size[1]
    ):
        message = (
            f"transformers' CLIP takes square images and a plain vision Transformer, got "
            f"{encoder.name}"
        )
        raise ConfigError(message, "unsupported", field="image_encoder")
    return {
        **_clip_sizes(net.transformer),
        "image_size": encoder.image_size[0],
        "patch_size": net.patch_size[0],
        "num_channels": encoder.in_channels,
        "projection_dim": encoder.feature_dim,
    }


def _clip_text_fields(encoder: TextEncoder, end_id: int) -> dict[str, Any]:
    net: Any = encoder.backbone
    return {
        **_clip_sizes(net.transformer),
        "vocab_size": net.vocab_size,
        "max_position_embeddings": net.context_length,
        "projection_dim": encoder.feature_dim,
        "eos_token_id": end_id,
        "pad_token_id": encoder.pad_id,
        "bos_token_id": None,
    }


def _clip_sizes(transformer: Any) -> dict[str, Any]:
    block = transformer.resblocks[0]
    return {
        "hidden_size": transformer.width,
        "num_hidden_layers": len(transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features,
        "hidden_act": "quick_gelu" if type(block.mlp.gelu).__name__ == "QuickGELU" else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }
