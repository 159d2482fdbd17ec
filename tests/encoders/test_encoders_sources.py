"""Where weights come from: the hub at a commit, its cache, torchvision's addresses; and what is said when they cannot."""

import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.errors import WeightsError

TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder("resnet18", **{**TINY_RESNET, **options})


def other(encoder: Any) -> dict[str, Tensor]:
    """Tensors for the encoder's backbone, all at other values than its own."""
    return {name: tensor + 1 for name, tensor in encoder.backbone.state_dict().items()}


@pytest.mark.fault("S12")
@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("missing/model.safetensors", r"missing/model.safetensors does not exist"),
        ("laion2b", r"'laion2b' is neither a file, nor a folder, nor OWNER/NAME@COMMIT"),
        ("timm/resnet18.a1_in1k", r"the commit must be named"),
        ("timm/resnet18.a1_in1k@main", r"revision 'main' is not a full commit hash"),
        (f"timm/resnet18.a1_in1k@{COMMIT}", r"HF_HUB_OFFLINE is set; fetch it on a connected machine \(`hf download"),
        (
            f"timm/resnet18.a1_in1k@{COMMIT}:a/b.safetensors",
            rf"a/b.safetensors of timm/resnet18.a1_in1k at .* {COMMIT}",
        ),
    ],
)
def test_sources_that_cannot_be_had(pretrained: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(WeightsError, match=message):
        small(pretrained=pretrained)
    assert time.monotonic() - started < 5


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds none of model.safetensors, "):
        small(pretrained=tmp_path)


def test_true_names_repository_and_revision() -> None:
    weights = IMAGE_PRESETS["resnet18"].weights
    assert weights is not None
    with pytest.raises(WeightsError) as caught:
        create_image_encoder("resnet18", pretrained=True)
    for part in (weights.hub_id, weights.revision, weights.filename, "local copy"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["clinicalbert", "bioalbert", "tiny_bert"])
def test_true_without_published_weights(name: str) -> None:
    with pytest.raises(WeightsError, match=rf"{name} has no published weights that are pinned here"):
        create_text_encoder(name, pretrained=True, num_hidden_layers=1)
    assert TEXT_PRESETS[name].hub_id is None


def test_true_of_a_library_s_model_asks_for_the_commit() -> None:
    with pytest.raises(WeightsError, match=r"timm/resnet10t.c3_in1k: add the commit"):
        create_image_encoder("timm:resnet10t", pretrained=True)


@pytest.mark.fault("S12")
def test_cached_file_is_taken_without_the_network_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache as the hub's client lays it out; then one bit of the file is another."""
    import hashlib

    from huggingface_hub import constants

    from medvl.common import hub

    tensors = other(small())
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    path = snapshot / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest) == path
    encoder = small(pretrained=f"owner/name@{COMMIT}")
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(WeightsError, match=r"is not the file that was pinned: its sha256 is"):
        hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest)


@pytest.mark.fault("S12")
def test_without_network_the_answer_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the hub client's own retries, which take over twenty seconds."""
    from huggingface_hub import constants

    from medvl.common import hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    started = time.monotonic()
    with pytest.raises(WeightsError, match=r"the hub cannot be reached|cannot be had from the hub"):
        hub.fetch("owner/name", "model.safetensors", COMMIT)
    assert time.monotonic() - started < 8


def test_torchvision_s_default_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned by the hash in their file's name, which torch checks; here the download is stood in for."""
    from urllib.error import URLError

    asked: list[tuple[str, dict[str, Any]]] = []
    tensors = other(create_image_encoder("torchvision:resnet18"))

    def download(url: str, **options: Any) -> dict[str, Tensor]:
        asked.append((url, options))
        return {**tensors, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    encoder = create_image_encoder("torchvision:resnet18", pretrained=True)
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    [(url, options)] = asked
    assert url.startswith("https://download.pytorch.org/models/resnet18-")
    assert (options["check_hash"], options["weights_only"]) == (True, True)

    def no_network(url: str, **options: Any) -> dict[str, Tensor]:
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    with pytest.raises(WeightsError, match=r"resnet18-\w+.pth cannot be had .* give pretrained=PATH"):
        create_image_encoder("torchvision:resnet18", pretrained=True)
