"""Sources of pretrained weights: the hub at a commit, its cache, torchvision's URLs, and their
errors.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from torch import Tensor

from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
from medvl.errors import WeightsError

TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_resnet(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder("resnet18", **{**TINY_RESNET, **options})


def changed_tensors(encoder: Any) -> dict[str, Tensor]:
    """Return the backbone's tensors, each with another value."""
    return {name: tensor + 1 for name, tensor in encoder.backbone.state_dict().items()}


@pytest.mark.fault("S12")
@pytest.mark.parametrize(
    ("pretrained", "code", "names"),
    [
        ("missing/model.safetensors", "not_found", "missing/model.safetensors"),
        ("laion2b", "out_of_range", "laion2b"),
        ("timm/resnet18.a1_in1k", "out_of_range", "commit"),
        ("timm/resnet18.a1_in1k@main", "out_of_range", "'main'"),
        (f"timm/resnet18.a1_in1k@{COMMIT}", "not_found", "hf download"),
        (f"timm/resnet18.a1_in1k@{COMMIT}:a/b.safetensors", "not_found", "a/b.safetensors"),
    ],
)
def test_unavailable_weights_raise_at_once(pretrained: str, code: str, names: str) -> None:
    started = time.monotonic()
    with raises(WeightsError, code, names=names):
        tiny_resnet(pretrained=pretrained)
    assert time.monotonic() - started < 5


def test_folder_without_weights_raises(tmp_path: Path) -> None:
    with raises(WeightsError, "not_found", "pretrained", names=str(tmp_path)):
        tiny_resnet(pretrained=tmp_path)


def test_pretrained_true_offline_names_repository_and_revision() -> None:
    weights = IMAGE_PRESETS["resnet18"].weights
    assert weights is not None
    with pytest.raises(WeightsError) as caught:
        create_image_encoder("resnet18", pretrained=True)
    for part in (weights.hub_id, weights.revision, weights.filename, "local copy"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["clinicalbert", "bioalbert", "tiny_bert"])
def test_pretrained_true_without_published_weights_raises(name: str) -> None:
    with raises(WeightsError, "not_found", "pretrained", names=name):
        create_text_encoder(name, pretrained=True, num_hidden_layers=1)
    assert TEXT_PRESETS[name].hub_id is None


def test_pretrained_true_of_a_timm_model_asks_for_a_commit() -> None:
    with raises(WeightsError, "not_found", "pretrained", names="timm/resnet10t.c3_in1k@COMMIT"):
        create_image_encoder("timm:resnet10t", pretrained=True)


@pytest.mark.fault("S12")
def test_cached_file_is_used_offline_and_its_hash_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a cache in the layout of the hub's client, then flip one bit of the file."""
    import hashlib

    from huggingface_hub import constants

    from medvl.common import hub

    tensors = changed_tensors(tiny_resnet())
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    path = snapshot / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest) == path
    encoder = tiny_resnet(pretrained=f"owner/name@{COMMIT}")
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with raises(WeightsError, "mismatch", names=digest):
        hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest)


@pytest.mark.fault("S12")
def test_download_without_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail before the hub client's own retries, which take over twenty seconds."""
    from huggingface_hub import constants

    from medvl.common import hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "ENDPOINT", "http://127.0.0.1:9"
    )  # the discard port: nothing listens
    started = time.monotonic()
    with raises(WeightsError, "not_found", names="owner/name"):
        hub.fetch("owner/name", "model.safetensors", COMMIT)
    assert time.monotonic() - started < 8


def test_torchvision_default_weights_are_checked_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash in the file name is checked by torch; the download is replaced here."""
    from urllib.error import URLError

    requests: list[tuple[str, dict[str, Any]]] = []
    tensors = changed_tensors(create_image_encoder("torchvision:resnet18"))

    def download(url: str, **options: Any) -> dict[str, Tensor]:
        requests.append((url, options))
        return {**tensors, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    encoder = create_image_encoder("torchvision:resnet18", pretrained=True)
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    [(url, options)] = requests
    assert url.startswith("https://download.pytorch.org/models/resnet18-")
    assert (options["check_hash"], options["weights_only"]) == (True, True)

    def no_network(url: str, **options: Any) -> dict[str, Tensor]:
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    with raises(WeightsError, "not_found", names="resnet18-"):
        create_image_encoder("torchvision:resnet18", pretrained=True)
