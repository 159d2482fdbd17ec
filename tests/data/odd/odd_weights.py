"""Files of weights as other tools, downloads and careless users leave them, made of a few tiny
tensors.

`written` writes a case into a folder and returns the path that a user would give.
"""

import collections
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def prefixed(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{key}": tensor for key, tensor in tensors.items()}


def other(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors of the same shapes and other values, as an average of weights has."""
    return {
        key: tensor * 2 if tensor.is_floating_point() else tensor for key, tensor in tensors.items()
    }


def optimizer() -> dict[str, Any]:
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    adam.step()
    return adam.state_dict()


def saved(
    make: Callable[[Tensors], Any], name: str = "model.pt", **options: Any
) -> Callable[[Tensors, Path], Path]:
    def write(tensors: Tensors, folder: Path) -> Path:
        torch.save(make(tensors), folder / name, **options)
        return folder / name

    return write


def raw(content: bytes, name: str = "model.pt") -> Callable[[Tensors, Path], Path]:
    def write(_: Tensors, folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def torch_bytes(tensors: Tensors, folder: Path) -> bytes:
    torch.save(dict(tensors), folder / "whole.tmp")
    return (folder / "whole.tmp").read_bytes()


def cut(name: str, share: float) -> Callable[[Tensors, Path], Path]:
    def write(tensors: Tensors, folder: Path) -> Path:
        is_safetensors = name.endswith(".safetensors")
        whole = (
            safetensors.torch.save(dict(tensors))
            if is_safetensors
            else torch_bytes(tensors, folder)
        )
        (folder / name).write_bytes(whole[: int(len(whole) * share)])
        return folder / name

    return write


def legacy_cut(tensors: Tensors, folder: Path) -> Path:
    path = saved(dict, _use_new_zipfile_serialization=False)(tensors, folder)
    path.write_bytes(path.read_bytes()[:-50])
    return path


def safetensors_as(name: str) -> Callable[[Tensors, Path], Path]:
    def write(tensors: Tensors, folder: Path) -> Path:
        safetensors.torch.save_file(dict(tensors), folder / name)
        return folder / name

    return write


def in_parts(
    suffix: str, given: str = "index", lost: bool = False
) -> Callable[[Tensors, Path], Path]:
    """Write two parts and their index, as `save_pretrained` of transformers does above 5 GB."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"

    def write(tensors: Tensors, folder: Path) -> Path:
        keys = list(tensors)
        files = [f"{stem}-0000{number}-of-00002{suffix}" for number in (1, 2)]
        for number, file in enumerate(files):
            part = {key: tensors[key] for key in keys[number::2]}
            safetensors_as(file)(part, folder) if suffix == ".safetensors" else torch.save(
                part, folder / file
            )
        content = {
            "metadata": {"total_size": 1},
            "weight_map": {key: files[position % 2] for position, key in enumerate(keys)},
        }
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(content))
        if lost:
            (folder / files[1]).unlink()
        return {
            "index": folder / f"{stem}{suffix}.index.json",
            "folder": folder,
            "part": folder / files[0],
        }[given]

    return write


def gzipped(tensors: Tensors, folder: Path) -> Path:
    (folder / "model.pt.gz").write_bytes(gzip.compress(torch_bytes(tensors, folder)))
    return folder / "model.pt.gz"


def changed(
    change: Callable[[Tensor], Tensor], key: str = "conv1.weight"
) -> Callable[[Tensors], Any]:
    return lambda tensors: {**tensors, key: change(tensors[key])}


def with_value(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.to(dtype)
        tensor.view(-1)[3] = value
        return tensor

    return changed(change)


def casted(dtype: torch.dtype) -> Callable[[Tensors], Any]:
    return lambda tensors: {
        key: t.to(dtype) if t.is_floating_point() else t for key, t in tensors.items()
    }


EXACT: dict[str, Callable[[Tensors, Path], Path]] = {
    "plain": saved(dict),
    "before torch 1.6": saved(dict, _use_new_zipfile_serialization=False),
    "before torch 1.6, pickle protocol 4": saved(
        dict, _use_new_zipfile_serialization=False, pickle_protocol=4
    ),
    "ordered": saved(collections.OrderedDict),
    "tensors with a class": saved(
        lambda t: {key: torch.nn.Buffer(tensor) for key, tensor in t.items()}
    ),
    "parameters": saved(
        lambda t: {k: torch.nn.Parameter(v, requires_grad=False) for k, v in t.items()}
    ),
    "DDP": saved(lambda t: {"state_dict": prefixed(t, "module.")}),
    "torch.compile": saved(lambda t: prefixed(t, "_orig_mod.")),
    "torch.compile in DDP": saved(lambda t: {"model": prefixed(t, "module._orig_mod.")}),
    "DDP in torch.compile": saved(lambda t: prefixed(t, "_orig_mod.module.")),
    "a compiled layer": saved(
        lambda t: {key.replace("layer2.", "layer2._orig_mod."): v for key, v in t.items()}
    ),
    "a wrapped layer": saved(
        lambda t: {key.replace("layer3.", "layer3.module."): v for key, v in t.items()}
    ),
    "Lightning": saved(
        lambda t: {
            "epoch": 3,
            "pytorch-lightning_version": "2.1",
            "state_dict": prefixed(t, "model."),
            "optimizer_states": [optimizer()],
            "callbacks": {
                "ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5)}
            },
            "hyper_parameters": {"class_weights": torch.ones(3, 4)},
        }
    ),
    "Lightning net": saved(lambda t: {"state_dict": prefixed(t, "net."), "epoch": 1}),
    "Lightning backbone": saved(lambda t: {"state_dict": prefixed(t, "backbone.")}),
    "Lightning backbone with its head": saved(
        lambda t: {
            "state_dict": prefixed(
                {**t, "fc.weight": torch.zeros(2, 32), "fc.bias": torch.zeros(2)}, "backbone."
            )
        }
    ),
    "Lightning model.model": saved(lambda t: {"state_dict": prefixed(t, "model.model.")}),
    "a student alone": saved(lambda t: prefixed(t, "student.")),
    "EMA alone": saved(lambda t: {"ema_state_dict": prefixed(t, "module."), "epoch": 3}),
    "optimizer beside": saved(
        lambda t: {"model": t, "optimizer": optimizer(), "scaler": {"scale": torch.ones(1)}}
    ),
    "optimizer under another name": saved(lambda t: {"net": t, "opt_g": optimizer()}),
    "a queue beside": saved(
        lambda t: {"model": t, "memory": torch.ones(7, 9), "epoch": torch.tensor(3)}
    ),
    "class centers beside": saved(
        lambda t: {"model": t, "center_loss": {"centers": torch.ones(3, 5)}}
    ),
    "statistics beside": saved(
        lambda t: {"model": t, "normalizer": {"mean": torch.ones(3), "std": torch.ones(3)}}
    ),
    "nested": saved(
        lambda t: {"state": {"model": {"weights": t}}, "rng": {"cuda": [torch.ones(2, 2)]}}
    ),
    "one dictionary twice": saved(lambda t: {"model": t, "net": t}),
    "float64": saved(casted(torch.float64)),
    "safetensors as .pt": safetensors_as("model.pt"),
    "safetensors as .bin": safetensors_as("pytorch_model.bin"),
    "safetensors as .ckpt": safetensors_as("last.ckpt"),
    "safetensors without suffix": safetensors_as("weights"),
    "torch as .safetensors": saved(dict, "model.safetensors"),
    "old torch as .safetensors": saved(
        dict, "model.safetensors", _use_new_zipfile_serialization=False
    ),
    "torch as .pth.tar": saved(
        lambda t: {"state_dict": prefixed(t, "module."), "arch": "resnet18"}, "best.pth.tar"
    ),
    "safetensors in parts": in_parts(".safetensors"),
    "torch in parts": in_parts(".bin"),
    "a folder of parts": in_parts(".safetensors", "folder"),
    "a folder of torch parts": in_parts(".bin", "folder"),
}
"""Files with exactly the tensors."""

CLOSE: dict[str, Callable[[Tensors, Path], Path]] = {
    "float16": saved(casted(torch.float16)),
    "bfloat16": saved(casted(torch.bfloat16)),
}
"""Files with the tensors in another precision."""

SETS: dict[str, tuple[Callable[[Tensors, Path], Path], tuple[str, str]]] = {
    "timm": (
        saved(
            lambda t: {
                "state_dict": t,
                "state_dict_ema": other(t),
                "optimizer": optimizer(),
                "epoch": 3,
            }
        ),
        ("state_dict", "state_dict_ema"),
    ),
    "DeiT": (
        saved(lambda t: {"model": t, "model_ema": other(t), "scaler": {}}),
        ("model", "model_ema"),
    ),
    "ema": (saved(lambda t: {"model": t, "ema": other(t)}), ("model", "ema")),
    "nested ema": (
        saved(
            lambda t: {
                "model": t,
                "ema": {"decay": 0.9, "updates": torch.tensor(7), "shadow": other(t)},
            }
        ),
        ("model", "ema"),
    ),
    "module": (saved(lambda t: {"module": t, "module_ema": other(t)}), ("module", "module_ema")),
    "swa": (saved(lambda t: {"net": t, "swa": prefixed(other(t), "module.")}), ("net", "swa")),
    "averaged_model": (
        saved(
            lambda t: {
                "state_dict": t,
                "averaged_model": {"n_averaged": torch.tensor(3), **prefixed(other(t), "module.")},
            }
        ),
        ("state_dict", "averaged_model"),
    ),
    "DINO": (
        saved(
            lambda t: {
                "student": prefixed(t, "module.backbone."),
                "teacher": prefixed(other(t), "backbone."),
                "dino_loss": {"center": torch.ones(1, 8)},
            }
        ),
        ("student", "teacher"),
    ),
    "Lightning's weight averaging": (
        saved(
            lambda t: {
                "current_model_state": prefixed(t, "model."),
                "state_dict": prefixed(other(t), "model."),
            }
        ),
        ("current_model_state", "state_dict"),
    ),
    "best and last": (saved(lambda t: {"last": t, "best_state": other(t)}), ("last", "best_state")),
    "folds": (saved(lambda t: {"models": [t, other(t)]}), ("models/0", "models/1")),
    "a callback's average": (
        saved(lambda t: {"state_dict": t, "callbacks": {"EMA": {"ema_weights": other(t)}}}),
        ("state_dict", "callbacks/EMA/ema_weights"),
    ),
    "flat beside ema": (saved(lambda t: {**t, "ema": other(t)}), (".", "ema")),
    "before torch 1.6": (
        saved(lambda t: {"model": t, "model_ema": other(t)}, _use_new_zipfile_serialization=False),
        ("model", "model_ema"),
    ),
    "keys of teacher and student": (
        saved(lambda t: {"state_dict": prefixed(t, "student.") | prefixed(other(t), "teacher.")}),
        ("student", "teacher"),
    ),
    "MoCo": (
        saved(
            lambda t: {
                "state_dict": prefixed(t, "module.encoder_q.")
                | prefixed(other(t), "module.encoder_k.")
            }
        ),
        ("module.encoder_q", "module.encoder_k"),
    ),
    "MoCo v3": (
        saved(lambda t: prefixed(t, "base_encoder.") | prefixed(other(t), "momentum_encoder.")),
        ("base_encoder", "momentum_encoder"),
    ),
    "BYOL": (
        saved(lambda t: prefixed(t, "online_encoder.") | prefixed(other(t), "target_encoder.")),
        ("online_encoder", "target_encoder"),
    ),
    "ema_model": (
        saved(lambda t: prefixed(t, "model.") | prefixed(other(t), "ema_model.")),
        ("model", "ema_model"),
    ),
    "safetensors with model_ema": (
        lambda t, folder: safetensors_as("m.safetensors")(
            prefixed(t, "model.") | prefixed(other(t), "model_ema."), folder
        ),
        ("model", "model_ema"),
    ),
}
"""Files with several sets of weights -> the names of the plain one, and of the copy with other
values.
"""

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 134217728\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body></body></html>"

REFUSED: dict[str, tuple[Callable[[Tensors, Path], Path], str, str]] = {
    "NaN": (saved(with_value(float("nan"))), "nonfinite", "conv1.weight"),
    "infinity": (saved(with_value(float("inf"))), "nonfinite", "conv1.weight"),
    "NaN in float16": (saved(with_value(float("nan"), torch.float16)), "nonfinite", "conv1.weight"),
    "NaN in bfloat16": (
        saved(with_value(float("-inf"), torch.bfloat16)),
        "nonfinite",
        "conv1.weight",
    ),
    "beyond float32": (saved(with_value(1e300, torch.float64)), "nonfinite", "conv1.weight"),
    "NaN in safetensors": (
        lambda t, folder: safetensors_as("m.safetensors")(with_value(float("nan"))(t), folder),
        "nonfinite",
        "conv1.weight",
    ),
    "NaN in an average of a batch norm": (
        saved(changed(lambda v: v * float("nan"), "bn1.running_var")),
        "nonfinite",
        "bn1.running_var",
    ),
    "int8": (
        saved(changed(lambda v: (v * 100).to(torch.int8))),
        "unsupported",
        "conv1.weight (int8)",
    ),
    "uint8": (
        saved(changed(lambda v: v.abs().to(torch.uint8))),
        "unsupported",
        "conv1.weight (uint8)",
    ),
    "float8": (
        saved(changed(lambda v: v.to(torch.float8_e4m3fn))),
        "unsupported",
        "unsupported storage",
    ),
    "sparse": (saved(changed(lambda v: v.to_sparse())), "mismatch", "conv1.weight"),
    "NumPy": (
        saved(lambda t: {key: v.numpy() for key, v in t.items()}),
        "mismatch",
        "_reconstruct",
    ),
    "a NumPy array": (saved(changed(lambda v: np.asarray(v))), "mismatch", "conv1.weight"),
    "a whole model": (saved(lambda _: torch.nn.Linear(3, 2)), "mismatch", "state_dict()"),
    "a whole model in a wrapper": (
        saved(lambda _: {"model": torch.nn.Linear(3, 2)}),
        "mismatch",
        "model",
    ),
    "settings only": (saved(lambda _: {"epoch": 3, "args": {"lr": 0.1}}), "mismatch", "state dict"),
    "an optimizer only": (saved(lambda _: {"optimizer": optimizer()}), "mismatch", "state dict"),
    "Git LFS": (raw(POINTER, "pytorch_model.bin"), "unsupported", "git lfs pull"),
    "Git LFS as safetensors": (raw(POINTER, "model.safetensors"), "unsupported", "git lfs pull"),
    "Git LFS with a byte-order mark": (
        raw(b"\xef\xbb\xbf" + POINTER),
        "unsupported",
        "git lfs pull",
    ),
    "git-annex": (raw(b"/annex/objects/MD5E-s1--aa.pt\n"), "unsupported", "git annex get"),
    "a web page": (raw(PAGE), "unsupported", "web page"),
    "a web page as safetensors": (
        raw(b"\n  " + PAGE.lower(), "model.safetensors"),
        "unsupported",
        "web page",
    ),
    "a server's error": (
        raw(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'),
        "unsupported",
        "server",
    ),
    "JSON": (raw(b'{"error": "Repository not found"}'), "unsupported", "JSON"),
    "a configuration": (raw(b'{\n "model_type": "bert"}', "config.json"), "unsupported", "JSON"),
    "text": (raw(b"Not Found"), "malformed", "get it again"),
    "empty": (raw(b""), "malformed", "empty"),
    "empty safetensors": (raw(b"", "model.safetensors"), "malformed", "empty"),
    "zeros": (raw(bytes(5000)), "malformed", "zeros"),
    "zeros as safetensors": (raw(bytes(5000), "model.safetensors"), "malformed", "zeros"),
    "gzip": (gzipped, "unsupported", "gunzip"),
    "xz": (raw(b"\xfd7zXZ\x00" + bytes(40)), "unsupported", "unxz"),
    "Keras": (raw(b"\x89HDF\r\n\x1a\n" + bytes(40), "model.h5"), "unsupported", "HDF5"),
    "GGUF": (raw(b"GGUF" + bytes(40), "model.gguf"), "unsupported", "GGUF"),
    "a plain pickle": (raw(b"\x80\x04}\x94."), "unsupported", "pickle"),
    "half a torch file": (cut("model.pt", 0.5), "malformed", "model.pt"),
    "a torch file without its end": (cut("model.pt", 0.99), "malformed", "model.pt"),
    "half a safetensors file": (cut("model.safetensors", 0.5), "malformed", "model.safetensors"),
    "a header of safetensors": (cut("model.safetensors", 0.01), "malformed", "model.safetensors"),
    "half an old torch file": (legacy_cut, "malformed", "model.pt"),
    "one part": (in_parts(".safetensors", "part"), "unsupported", "model.safetensors.index.json"),
    "one torch part": (in_parts(".bin", "part"), "unsupported", "pytorch_model.bin.index.json"),
    "a lost part": (
        in_parts(".safetensors", "folder", lost=True),
        "not_found",
        "model-00002-of-00002.safetensors",
    ),
    "an index out of its folder": (
        raw(
            b'{"weight_map": {"conv1.weight": "../x.safetensors"}}', "model.safetensors.index.json"
        ),
        "malformed",
        "no file beside it",
    ),
    "an index with a key twice": (
        raw(b'{"weight_map": {"a": "x", "a": "y"}}', "model.safetensors.index.json"),
        "malformed",
        "twice",
    ),
}
"""Files that are refused -> the code and a part of the message."""
