"""Creation, saving and loading of models, and ConVIRT as published."""

import dataclasses
import json
import math
import os
import resource
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from helpers.errors import raises
from helpers.fusion_samples import tiny_model
from helpers.two_ranks import on_two_ranks
from torch.nn.parallel import DistributedDataParallel

import medvl
from medvl import losses
from medvl.common.files import new_folder
from medvl.data.shards.format import Manifest
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.encoders.regions import RegionEncoder
from medvl.errors import CheckpointError, ConfigError, SplitError
from medvl.eval.core.open import refuse_training_patients
from medvl.models import (
    Detector,
    DualStreamConfig,
    copy_training,
    create_classifier,
    create_dense,
    create_vqa,
    train_manifests,
)
from medvl.models.checkpoint import save
from medvl.models.dual_encoders.convirt import ConVIRT, ConVIRTConfig
from medvl.schema import Batch, Embeddings

TEXTS = [
    "There is a small left effusion.",
    "No pneumothorax.",
    "The heart is mildly enlarged and the lungs are clear.",
]
TINY: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 64,
    "projection_dim": 32,
    "frozen_text_layers": 1,
}
GLORIA = {**{name: TINY[name] for name in ("image_encoder", "text_encoder", "image_size",
    "projection_dim")},
          "encoder_size": None, "margin": 0, "text_layers": 2}  # fmt: skip
FUSION = DualStreamConfig(
    image_arguments={},
    width=32,
    layers=1,
    heads=2,
    intermediate=32,
    image_positions=True,
    fusion_lr_mult=1.0,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece(TEXTS, vocab_size=200, min_frequency=1)


@pytest.fixture
def model(tokenizer: Tokenizer) -> ConVIRT:
    torch.manual_seed(0)
    created = medvl.create_model("convirt", tokenizer=tokenizer, **TINY)
    assert isinstance(created, ConVIRT)
    return created


def make_batch(tokenizer: Tokenizer, size: int = 6) -> Batch:
    texts = [TEXTS[number % 3] for number in range(size)]
    ids_BT, mask_BT = tokenizer(texts)
    generator = torch.Generator().manual_seed(1)
    return Batch(
        keys=[str(number) for number in range(size)],
        image_BCHW=torch.randint(0, 256, (size, 1, 64, 64), dtype=torch.uint8, generator=generator),
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.zeros(size, 0),
        texts=texts,
    )


def test_list_models_takes_wildcards() -> None:
    assert "convirt" in medvl.list_models("*")
    assert medvl.list_models("con*") == ["convirt"]
    assert medvl.list_models("nothing*") == []


def test_convirt_has_the_published_defaults() -> None:
    config = ConVIRTConfig()
    assert (config.image_encoder, config.text_encoder, config.image_size) == (
        "resnet50",
        "bioclinicalbert",
        224,
    )
    assert (config.projection_dim, config.frozen_text_layers) == (512, 6)
    assert (config.temperature, config.image_weight) == (0.1, 0.75)


@pytest.mark.slow
def test_convirt_of_published_size_is_created_without_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(*arguments: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    model = medvl.create_model("convirt")
    count = sum(parameter.numel() for parameter in model.parameters())
    # ResNet-50 without its classifier 23,508,032; BERT-base with 28,996 pieces and without pooler
    # 107,719,680 (with it 108,310,272); two heads: (2048 + 1) * 2048 + (2048 + 1) * 512 and (768 +
    # 1) * 768 + (768 + 1) * 512.
    heads = 2049 * 2048 + 2049 * 512 + 769 * 768 + 769 * 512
    assert count - heads in (23_508_032 + 107_719_680, 23_508_032 + 108_310_272)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all(name.startswith("text_encoder.") for name in frozen)
    layers = {part for name in frozen for part in name.split(".") if part.isdigit()}
    assert layers == {str(layer) for layer in range(6)}
    image = torch.zeros(2, 1, 224, 224, dtype=torch.uint8)
    assert model.eval().encode_image(image).shape == (2, 512)


def test_every_trained_parameter_gets_a_gradient(model: ConVIRT, tokenizer: Tokenizer) -> None:
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    model(make_batch(tokenizer)).total.backward()
    # timm starts the last norm of each residual branch at zero: before a step nothing passes it
    optimizer.step()
    optimizer.zero_grad()
    model(make_batch(tokenizer)).total.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None, name
            assert name.startswith("text_encoder."), name


def test_the_loss_equals_the_published_one_and_starts_near_ln_b(
    model: ConVIRT, tokenizer: Tokenizer
) -> None:
    model.eval()
    batch = make_batch(tokenizer)
    result = model(batch)
    image_BE, text_BE = (
        model.encode_image(batch.image_BCHW),
        model.encode_text(batch.ids_BT, batch.mask_BT),
    )
    torch.testing.assert_close(result.total, losses.convirt(image_BE, text_BE, 0.1, 0.75))
    assert set(result.terms) == {"contrastive"}
    assert result.total.item() == pytest.approx(math.log(len(batch)), abs=0.5)


def test_embeddings_are_unit_vectors_and_similarity_is_their_cosine(
    model: ConVIRT, tokenizer: Tokenizer
) -> None:
    model.eval()
    batch = make_batch(tokenizer, 4)
    image_NE, text_ME = model.encode_image(batch.image_BCHW), model.encode_text(TEXTS)
    torch.testing.assert_close(image_NE.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(text_ME.norm(dim=-1), torch.ones(3))
    similarity = model.similarity(batch.image_BCHW, TEXTS)
    assert similarity.shape == (4, 3)
    torch.testing.assert_close(similarity, image_NE @ text_ME.T)
    torch.testing.assert_close(
        model.similarity(Embeddings(image_NE), model.embed_texts(TEXTS)), similarity
    )


def test_embeddings_do_not_depend_on_padding_or_the_batch(
    model: ConVIRT, tokenizer: Tokenizer
) -> None:
    model.eval()
    together = model.encode_text(TEXTS)
    alone = torch.cat([model.encode_text([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    batch = make_batch(tokenizer, 3)
    images = model.encode_image(batch.image_BCHW)
    torch.testing.assert_close(
        images[[2]], model.encode_image(batch.image_BCHW[[2]]), rtol=1e-5, atol=1e-6
    )


def test_a_loaded_model_equals_the_saved_one(model: ConVIRT, tmp_path: Path) -> None:
    model.eval()
    save(model, tmp_path, {"recipe": "test"})
    loaded = medvl.load(tmp_path)
    assert not loaded.training
    assert loaded.config == model.config
    assert loaded.transform == model.transform
    assert loaded.tokenizer is not None
    for (name, mine), (other, theirs) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(loaded.encode_text(TEXTS), model.encode_text(TEXTS), rtol=0, atol=0)
    assert json.loads((tmp_path / "config.json").read_text())["run"] == {"recipe": "test"}
    again = medvl.create_model(tmp_path)
    assert torch.equal(again.encode_text(TEXTS), model.encode_text(TEXTS))
    with raises(ConfigError, "conflict"):
        medvl.create_model(tmp_path, projection_dim=3)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_weights_follow_the_umask(umask: int, model: ConVIRT, tmp_path: Path) -> None:
    """Weights used to be readable for their owner alone, beside a config that everyone could
    read.
    """
    before = os.umask(umask)
    try:
        save(model, tmp_path)
        with new_folder(tmp_path / "run") as folder:
            safetensors.torch.save_file({"step": torch.zeros(1)}, folder / "optimizer.safetensors")
    finally:
        os.umask(before)
    for name in ("config.json", "model.safetensors", "run/optimizer.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask, name
    assert not list(tmp_path.rglob(".*"))


def test_a_model_continues_from_a_checkpoint(
    model: ConVIRT, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(model, tmp_path)
    torch.manual_seed(1)
    settings = {**TINY, "temperature": 0.2}
    again = medvl.create_model(
        "convirt", pretrained=True, init_from=tmp_path, **settings
    )  # without the network
    weights = model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())
    assert again.tokenizer is not None
    assert again.tokenizer.vocabulary == tokenizer.vocabulary
    assert "temperature 0.1, this model has 0.2" in caplog.text
    with raises(CheckpointError, "mismatch", names="image_head"):
        medvl.create_model("convirt", init_from=tmp_path, **{**TINY, "projection_dim": 16})
    with raises(ConfigError, "unsupported", "init_from"):
        medvl.create_model(
            "classifier", init_from=tmp_path, encoder=model.image_encoder.config, labels=["Edema"]
        )


def test_a_checkpoint_knows_the_training_data_of_its_ancestors(
    model: ConVIRT, tmp_path: Path
) -> None:
    """A model that started from another checkpoint used to know its own training data only."""
    folders = [tmp_path / name for name in ("convirt", "gloria", "head", "dense", "vqa")]
    for folder in folders:
        folder.mkdir()
    save(model, folders[0], {"train_manifest": manifest_of("first")})
    gloria = medvl.create_model("gloria", init_from=folders[0], **GLORIA)
    save(gloria, folders[1], {"train_manifest": manifest_of("second")})
    save(
        create_classifier(folders[1], ["Edema"]),
        folders[2],
        {"train_manifest": manifest_of("third")},
    )
    save(
        medvl.load(folders[2]), folders[2], {"train_manifest": manifest_of("third")}
    )  # the same data again
    save(create_dense(Detector, folders[2], ["Edema"], size=96), folders[3])
    save(
        create_vqa(folders[0], ["yes", "no"], fusion=FUSION),
        folders[4],
        {"train_manifest": manifest_of("vqa")},
    )
    corpora = [[manifest.corpus for manifest in train_manifests(folder)] for folder in folders]
    assert corpora[:2] == [["first"], ["second", "first"]]
    assert corpora[2:] == [
        ["third", "second", "first"],
        ["third", "second", "first"],
        ["vqa", "first"],
    ]


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        (
            "single_stream",
            {"image_encoder": "resnet_tiny", "image_arguments": {}, "image_positions": True},
            96,
        ),
        ("medvill", {"attention": "seq2seq", "objective": "report"}, None),
    ],
)
def test_a_fusion_encoder_that_is_built_anew_knows_its_ancestors(
    name: str, settings: dict[str, Any], size: int | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Another image size, or another attention for reading, makes a new model with the same
    weights.
    """
    folders = [tmp_path / each for each in ("pretrained", "vqa")]
    for folder in folders:
        folder.mkdir()
    save(
        tiny_model(name, tokenizer, **settings),
        folders[0],
        {"train_manifest": manifest_of("first")},
    )
    vqa = create_vqa(folders[0], ["yes", "no"], fusion=None, image_size=size)
    recorded = [each["corpus"] for each in vqa.fusion_model.image_encoder.trained_on]
    assert recorded == [each["corpus"] for each in vqa.fusion_model.trained_on] == ["first"]
    save(vqa, folders[1], {"train_manifest": manifest_of("vqa")})
    assert [manifest.corpus for manifest in train_manifests(folders[1])] == ["vqa", "first"]
    with raises(SplitError, "leak", names="1 patients"):
        refuse_training_patients(folders[1], source_of("first"))


def test_a_copy_of_weights_knows_the_detector_of_its_regions() -> None:
    old, new = RegionEncoder(8), RegionEncoder(8)
    old.bind("grid", "hash", 8, [manifest_of("first")])
    copy_training(old, new)
    assert (new.detector, new.trained_on) == ("hash", (manifest_of("first"),))


@pytest.mark.parametrize("salt", ["salt", "other"])
def test_an_evaluation_refuses_training_patients_of_ancestors(
    salt: str, model: ConVIRT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "start").mkdir()
    save(model, tmp_path / "start", {"train_manifest": manifest_of("first")})
    save(
        medvl.load(tmp_path / "start"),
        tmp_path,
        {"train_manifest": manifest_of("second", salt=salt)},
    )
    refuse_training_patients(tmp_path, source_of("third"))
    assert ("another salt" in caplog.text) == (salt == "other")  # nothing was said
    with raises(SplitError, "leak", names="1 patients"):
        refuse_training_patients(tmp_path, source_of("first"))


def manifest_of(corpus: str, salt: str = "salt") -> dict[str, Any]:
    none = {
        "planned": 0,
        "excluded_from_corpus": {},
        "excluded": {},
        "skipped": {},
        "skipped_keys": (),
        "warnings": {},
    }
    return dataclasses.asdict(
        Manifest(
            corpus=corpus, split="train", samples=1, shards=(), label_names=(), options={},
            packages={}, patients=(f"patient of {corpus}",), salt=salt, **none,
        )
    )  # fmt: skip


def source_of(corpus: str) -> Any:
    return SimpleNamespace(
        manifest=Manifest.parse(manifest_of(corpus), corpus), folder=Path(corpus)
    )


@pytest.mark.parametrize("change", [{"projection_dim": 2_000_000}, {"projection_dim": 2**61}])
def test_a_configuration_cannot_allocate_more_than_the_weights(
    change: dict[str, Any], model: ConVIRT, tmp_path: Path
) -> None:
    """The configuration of a foreign checkpoint used to be built (3.9 GB here) before its shapes
    were compared.
    """
    save(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["model"]["settings"] |= change
    (tmp_path / "config.json").write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises(CheckpointError, "mismatch", names="model.safetensors"):
        medvl.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


def replace_weights(folder: Path, change: dict[str, Any]) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "code", "names"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "not_found", "model.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 100), "malformed", "model.safetensors"),
        (lambda f: torch.save({"a": 1}, f / "model.safetensors"), "malformed", "model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "not_found", "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "malformed", "config.json"),
        (lambda f: (f / "config.json").write_text("[]"), "malformed", "config.json"),
        (
            lambda f: (f / "config.json").write_text('{"format": 1, "model": {"name": "gloria"}}'),
            "version",
            "format 2",
        ),
        (
            lambda f: (f / "config.json").write_text('{"format": 2, "model": {"name": "gloria"}}'),
            "malformed",
            "settings",
        ),
        (
            lambda f: replace_weights(f, {"image_head.0.bias": None}),
            "mismatch",
            "missing image_head.0.bias",
        ),
        (lambda f: replace_weights(f, {"extra": torch.zeros(1)}), "mismatch", "unexpected extra"),
        (
            lambda f: replace_weights(f, {"text_head.2.bias": torch.zeros(5)}),
            "mismatch",
            "text_head.2.bias: expected (32,), got (5,)",
        ),
    ],
)
def test_load_rejects_a_damaged_checkpoint(
    model: ConVIRT, tmp_path: Path, damage: Any, code: str, names: str
) -> None:
    save(model, tmp_path)
    damage(tmp_path)
    with raises(CheckpointError, code, names=names):
        medvl.load(tmp_path)


@pytest.mark.fault("S1")
def test_load_rejects_a_pickle_without_running_it(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save({"model": Payload()}, tmp_path / "last.pt")
    with raises(CheckpointError, "unsupported"):
        medvl.load(tmp_path / "last.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "last.pt").rename(tmp_path / "folder/model.safetensors")
    (tmp_path / "folder/config.json").write_text(
        json.dumps(
            {"format": 2, "model": {"name": "convirt", "settings": {**TINY, "vocab_size": 50}}}
        )
    )
    with raises(CheckpointError, "malformed"):
        medvl.load(tmp_path / "folder")
    assert not (tmp_path / "executed").exists()
    with raises(CheckpointError, "not_found"):
        medvl.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "settings", "code", "field"),
    [
        ("convrit", {}, "unknown_name", "name"),
        ("convirt", {"temprature": 1}, "unknown_name", "temprature"),
        ("convirt", {"temperature": 0}, "out_of_range", "temperature"),
        ("convirt", {"image_weight": 2}, "out_of_range", "image_weight"),
        (object(), {}, "wrong_type", "name"),
    ],
)
def test_create_model_rejects_invalid_names_and_settings(
    name: Any, settings: dict, code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        medvl.create_model(name, **settings)


def test_the_vocabulary_size_follows_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert (
        medvl.create_model("convirt", tokenizer=tokenizer, **TINY).config.vocab_size
        == tokenizer.vocab_size
    )
    config = ConVIRTConfig(**TINY, vocab_size=10)
    with raises(ConfigError, "mismatch", "tokenizer"):
        medvl.create_model(config, tokenizer=tokenizer)
    bare = medvl.create_model(dataclasses.replace(config, vocab_size=300))
    with raises(ConfigError, "missing", "tokenizer"):
        bare.encode_text(["text"])
    assert bare.encode_text(
        torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    ).shape == (1, 32)
    with raises(ConfigError, "missing", "mask_BT"):
        bare.encode_text(torch.ones(1, 3, dtype=torch.long))


def gradients_of_this_rank(folder: Path) -> dict[str, torch.Tensor]:
    """Return loss and gradients of a saved model on four rows of rank 0 and three of rank 1."""
    model = medvl.load(folder)
    parallel = DistributedDataParallel(model)
    whole = safetensors.torch.load_file(folder / "batch.st")
    mine = slice(0, 4) if dist.get_rank() == 0 else slice(4, 7)
    part = {name: tensor[mine] for name, tensor in whole.items()}
    size = len(part["ids"])
    batch = Batch(
        keys=[""] * size,
        image_BCHW=part["image"],
        ids_BT=part["ids"],
        mask_BT=part["mask"],
        labels_BL=torch.zeros(size, 0),
        texts=[""] * size,
    )
    loss = parallel(batch).total
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "loss": loss.detach()}


@pytest.mark.slow
def test_two_ranks_compute_the_gradients_of_one(
    model: ConVIRT, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Loss and gradients equal those of the global batch with unequal ranks; dropout and batch
    statistics are off.
    """
    save(model, tmp_path)
    batch = make_batch(tokenizer, 7)
    tensors = {"image": batch.image_BCHW, "ids": batch.ids_BT, "mask": batch.mask_BT}
    safetensors.torch.save_file(tensors, tmp_path / "batch.st")
    actual, _ = on_two_ranks(gradients_of_this_rank, tmp_path)
    alone = medvl.load(tmp_path)
    loss = alone(batch).total
    loss.backward()
    torch.testing.assert_close(actual.pop("loss"), loss.detach(), rtol=1e-6, atol=1e-6)
    expected = {
        name: parameter.grad
        for name, parameter in alone.named_parameters()
        if parameter.grad is not None
    }
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_frozen_text_layers_keep_their_dropout() -> None:
    """LoVT's code freezes weights alone; the text of a frozen layer varies in training as that
    of the others.
    """
    model = medvl.create_model("convirt", **TINY).train()
    frozen = [
        module for module in model.text_encoder.modules() if isinstance(module, torch.nn.Dropout)
    ]
    assert not model.text_encoder.backbone.encoder.layer[0].output.dense.weight.requires_grad
    assert all(module.training for module in frozen)
