"""Reading published checkpoints: wrapped, with objects beside the tensors, hostile, damaged. No
code in them is run.
"""

import argparse
import collections
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from helpers.published import random_tensors, shapes_of

import medvl
from medvl.cli import main as cli
from medvl.encoders import ImageEncoder
from medvl.encoders.weight_files import read_weight_file
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.export import import_checkpoint, load_encoder

TENSORS = {"conv.weight": torch.arange(24.0).view(2, 3, 4), "count": torch.tensor(7)}


class Evil:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.trace),))


def saved(content: Any, path: Path, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def equal(actual: Any, expected: Any) -> bool:
    return set(actual) == set(expected) and all(
        torch.equal(actual[key], expected[key]) for key in expected
    )


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: {"state_dict": t}, lambda t: {"model": t, "epoch": 3}]
)
def test_wrapped_state_dicts_are_read(tmp_path: Path, wrap: Any) -> None:
    assert equal(read_weight_file(saved(wrap(TENSORS), tmp_path / "a.ckpt")).tensors, TENSORS)
    old = saved(wrap(TENSORS), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    if "epoch" not in wrap(TENSORS):
        assert equal(read_weight_file(old).tensors, TENSORS)


def test_objects_beside_the_tensors_are_listed_and_not_built(tmp_path: Path) -> None:
    """As in Lightning's checkpoints: hyperparameters, callbacks by class, an optimizer, NumPy
    numbers.
    """
    layer = torch.nn.Linear(2, 3)
    content = {
        "state_dict": collections.OrderedDict(layer.state_dict()),
        "hyper_parameters": argparse.Namespace(lr=1e-4, path=Path("data")),
        "callbacks": {
            torch.nn.Linear: {"best": np.float64(0.5)},
            "seen": {1, 2},
            "kinds": frozenset("ab"),
        },
        "optimizer_states": [torch.optim.Adam(layer.parameters()).state_dict()],
        "module": layer,
        "counts": collections.defaultdict(int, {"a": 1}),
    }
    checkpoint = read_weight_file(saved(content, tmp_path / "last.ckpt"))
    assert equal(checkpoint.tensors, layer.state_dict())
    assert {
        "argparse.Namespace",
        "torch.nn.modules.linear.Linear",
        "collections.defaultdict",
    } <= set(checkpoint.blanks)


def test_views_ties_dtypes_and_parameters_are_kept(tmp_path: Path) -> None:
    table = torch.randn(6, 4)
    content = {
        "table": torch.nn.Parameter(table),
        "tied": table,
        "transposed": table.T,
        "part": table[1:3, 2:],
        "half": table.half(),
        "bfloat": table.bfloat16(),
        "flags": table > 0,
        "none": torch.empty(0, 3),
    }
    tensors = read_weight_file(saved(content, tmp_path / "a.pt")).tensors
    assert equal(tensors, content)
    assert {key: tensor.dtype for key, tensor in tensors.items()} == {
        key: t.dtype for key, t in content.items()
    }
    assert tensors["tied"].data_ptr() == tensors["table"].data_ptr()


@pytest.mark.fault("S1")
@pytest.mark.parametrize("zipped", [True, False])
def test_expanded_tensors_are_refused(tmp_path: Path, zipped: bool) -> None:
    """A file of a few bytes could claim any size; nothing of that size is allocated."""
    tensors = {**TENSORS, "huge": torch.zeros(1).expand(1 << 40)}
    path = saved(tensors, tmp_path / "a.ckpt", _use_new_zipfile_serialization=zipped)
    with raises(WeightsError, "unsupported", names="huge"):
        read_weight_file(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_file_is_refused_and_never_run(tmp_path: Path, zipped: bool) -> None:
    trace = tmp_path / "trace"
    content = {"state_dict": TENSORS, "hyper_parameters": Evil(trace)}
    path = saved(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match="refers to posix.mkdir"):
        read_weight_file(path)
    assert not trace.exists()


@pytest.mark.fault("S1")
def test_builtins_that_run_code_are_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (eval, ("1",))

    with raises(WeightsError, "unsupported", names="__builtin__.eval"):
        read_weight_file(saved({"a": torch.zeros(1), "b": Runs()}, tmp_path / "a.pt"))


def damaged(path: Path, change: Any) -> Path:
    """Return the archive after a change of its entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda e: e.update({"a/data/0": e["a/data/0"][:-4]}), "malformed"),
        (lambda e: e.pop("a/data/0"), "malformed"),
        (lambda e: e.update({"a/data.pkl": e["a/data.pkl"][:-9]}), "malformed"),
        (lambda e: e.update({"a/byteorder": b"big"}), "unsupported"),
        (lambda e: e.update({"a/code/model.py": b""}), "unsupported"),
        (  # a size beyond the storage
            lambda e: e.update(
                {"a/data.pkl": e["a/data.pkl"].replace(b"K\x02K\x03K\x04", b"K\x02K\x03K\x05")}
            ),
            "malformed",
        ),
        (  # a stride beyond the storage
            lambda e: e.update(
                {"a/data.pkl": e["a/data.pkl"].replace(b"K\x0cK\x04K\x01", b"K\x0dK\x04K\x01")}
            ),
            "malformed",
        ),
    ],
)
def test_damaged_archive_error_names_the_file(tmp_path: Path, change: Any, code: str) -> None:
    path = damaged(saved(TENSORS, tmp_path / "a.pt"), change)
    with raises(WeightsError, code, names="a.pt"):
        read_weight_file(path)


def test_files_without_a_state_dict_are_refused(tmp_path: Path) -> None:
    with raises(WeightsError, "not_found", names="none.pt"):
        read_weight_file(tmp_path / "none.pt")
    with raises(WeightsError, "not_found", names="is a folder"):
        read_weight_file(tmp_path)
    with raises(WeightsError, "mismatch", names="list.pt"):
        read_weight_file(saved([1, 2], tmp_path / "list.pt"))
    with raises(WeightsError, "mismatch", names="'name'"):
        read_weight_file(saved({"a": torch.zeros(1), "name": "x"}, tmp_path / "mixed.pt"))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("pytorch_model.bin", b"")
    with raises(WeightsError, "malformed", names="pytorch_model.bin"):
        read_weight_file(tmp_path / "model.zip")


def test_several_state_dicts_side_by_side_are_read(tmp_path: Path) -> None:
    content = {
        "image_encoder": {"a": torch.ones(1)},
        "text_encoder": {"a": torch.zeros(1)},
        "epoch": 3,
    }
    parts = ("image_encoder", "text_encoder")
    found = read_weight_file(saved(content, tmp_path / "kad.pt"), parts=parts)
    assert list(found.tensors) == ["image_encoder/a", "text_encoder/a"]
    assert found.beside == {"epoch": "no weights of the model"}


def biovil(tmp_path: Path) -> Path:
    tensors = random_tensors(shapes_of("biovil_image"))
    return saved(
        {key: tensor.half() if tensor.ndim == 4 else tensor for key, tensor in tensors.items()},
        tmp_path / "b.pt",
    )


def test_import_command_writes_encoders_that_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["import", "biovil_image", str(biovil(tmp_path)), "--out", str(tmp_path / "out")])
    output = capsys.readouterr().out
    assert "318 tensors loaded, 10 left out, see import.json" in output
    assert "left out: a projection of image or words" in output
    report = json.loads((tmp_path / "out" / "import.json").read_text())
    assert report["system"] == "biovil_image"
    assert report["left_out"]["projector.model.0.weight"].startswith("a projection")
    encoder = load_encoder(tmp_path / "out" / "image_encoder")
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.mean, encoder.std, encoder.image_size) == ((0.0,) * 3, (1.0,) * 3, (480, 480))
    tensors = read_weight_file(tmp_path / "b.pt").tensors
    assert torch.equal(
        encoder.get_parameter("backbone.conv1.weight"),
        tensors["encoder.encoder.conv1.weight"].float(),
    )
    reloaded = medvl.encoders.create_image_encoder(
        "resnet50", pretrained=tmp_path / "out" / "image_encoder"
    )
    assert torch.equal(reloaded.backbone.conv1.weight, encoder.backbone.conv1.weight)
    with raises(ConfigError, "exists", "out"):
        import_checkpoint("biovil_image", tmp_path / "b.pt", out=tmp_path / "out")
    with raises(ConfigError, "conflict", "tokenizer"):
        import_checkpoint("biovil_image", tmp_path / "b.pt", tokenizer="clip")


def test_safetensors_files_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "a.safetensors")
    assert equal(read_weight_file(tmp_path / "a.safetensors").tensors, TENSORS)


def test_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, "not_found", names="encoder.json"):
        load_encoder(tmp_path)


def test_import_list_shows_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["import", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("chexzero ") and " system " in line for line in lines)
    assert any(line.startswith("benchx_converters ") and "not imported" in line for line in lines)
    with pytest.raises(SystemExit):
        cli.main(["import", "gloria"])
    assert "medvl import SYSTEM FILE --out DIR" in capsys.readouterr().err
