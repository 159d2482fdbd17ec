"""Zero-shot classification and retrieval over volumes, by models of volumes and of images."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from helpers.contrastive_systems import fvlm
from helpers.errors import raises
from helpers.volume_shards import SHAPE, volume_shards

import medvl
from medvl.cli import main as cli
from medvl.data.corpora.volumes.ct_rate import LABELS
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import list_prompts, load_prompts, read_results
from medvl.eval.core.full_pass import _pool_slices
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.probing.features import ProbedEncoder, encode_features
from medvl.eval.zero_shot_classification.protocol import predict, zero_shot
from medvl.inference import embed
from medvl.models.checkpoint import save
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.phantom.population.volumes import CT_FINDINGS
from medvl.schema import Embeddings

PATIENTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return volume_shards(tmp_path_factory.mktemp("volumes"), PATIENTS, split="test")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    source = ShardSource(folder)
    return train_wordpiece(
        [text for row in range(len(source)) for text in source.sample(row).sections.values()]
    )


def of_images(tokenizer: Tokenizer) -> DualEncoder:
    torch.manual_seed(0)
    model: DualEncoder = medvl.create_model(
        "clip",
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        tokenizer=tokenizer,
        image_size=32,
        projection_dim=16,
    )
    return model


def of_volumes(tokenizer: Tokenizer) -> DualEncoder:
    torch.manual_seed(0)
    model: DualEncoder = medvl.create_model(
        "hlip",
        volume_size=SHAPE,
        image_arguments={"patch_size": (4, 8, 8), "embed_dim": 24, "depth": 3, "num_heads": 2},
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        tokenizer=tokenizer,
        projection_dim=16,
    )
    return model


def test_prompts_of_ct_rate() -> None:
    assert {"ct_clip", "hlip_organ", "hlip_volume"} <= set(list_prompts())
    pair = load_prompts("ct_clip").classes["Lung nodule"]
    assert (pair.positive, pair.negative) == (
        ("There is Lung nodule.",),
        ("There is no Lung nodule.",),
    )
    assert tuple(load_prompts("ct_clip").classes) == LABELS
    organ, volume = (load_prompts(f"hlip_{name}") for name in ("organ", "volume"))
    assert tuple(organ.classes) == tuple(volume.classes)
    assert set(LABELS) - set(organ.classes) == {"Medical material", "Lymphadenopathy"}
    assert organ.classes["Hiatal hernia"].positive == ("The esophagus shows: Hiatal hernia.",)
    assert organ.classes["Lung nodule"].negative == ("The lung shows: Not nodule.",)
    assert volume.classes["Lung nodule"].negative == ("The volume shows: Not lung nodule.",)
    assert volume.classes["Atelectasis"].negative == ("The volume shows: Not atelectatic.",)
    both = volume.for_labels(LABELS).classes
    assert both["Lymphadenopathy"].positive == ("The volume shows: lymphadenopathy.",)


def test_slices_of_a_volume_are_averaged(folder: Path, tokenizer: Tokenizer) -> None:
    """The score of a volume is that of the normalised mean of its slices' vectors."""
    model = of_images(tokenizer).eval()
    source = ShardSource(folder)
    loader = open_for_evaluation(source, model.transform, tokenizer, batch=3, workers=0, slices=4)
    prompts = load_prompts("ct_clip").for_labels(source.label_names, list(CT_FINDINGS))
    found = predict(model, loader, [prompts]).scores_NL[0]
    assert found.shape == (2 * PATIENTS, len(CT_FINDINGS))
    (batch,) = open_for_evaluation(
        source, model.transform, tokenizer, batch=99, workers=0, slices=4
    )
    with torch.no_grad():
        for row in (0, 5):
            vector_E = model.encode_image(batch.slices_BNCHW[row]).mean(dim=0)
            vector_E = vector_E / vector_E.norm()
            for column, sides in enumerate(prompts.classes.values()):
                yes, no = model.encode_text([*sides.positive, *sides.negative]) @ vector_E
                expected = torch.sigmoid((yes - no).double())
                assert found[row, column] == pytest.approx(float(expected), abs=1e-5)


def test_local_vectors_of_slices_are_those_of_the_volume() -> None:
    local = torch.arange(24.0).reshape(4, 3, 2)
    mask = torch.tensor([[True, True, False]] * 4)
    pooled = _pool_slices(Embeddings(3 * torch.eye(4, 5), local, mask), 2)
    assert torch.equal(pooled.global_NE[0], torch.tensor([1.5, 1.5, 0, 0, 0])), "not unit vectors"
    assert torch.equal(pooled.local_NPE[1], local[2:].flatten(0, 1))
    assert pooled.mask_NP.tolist() == [[True, True, False] * 2] * 2
    with raises(EvaluationError, "unsupported"):
        _pool_slices(Embeddings(torch.eye(4), weight_NP=torch.ones(4, 1)), 2)


def test_scores_of_reconstructions_are_averaged(folder: Path, tokenizer: Tokenizer) -> None:
    model = of_volumes(tokenizer).eval()
    source = ShardSource(folder)

    def evaluated(by_scan: bool):
        loader = open_for_evaluation(source, model.transform, tokenizer, batch=5, workers=0)
        return zero_shot(model, loader, "ct_clip", by_scan=by_scan, resamples=0)

    volumes, scans = evaluated(False).images, evaluated(True).images
    assert len(volumes.samples) == 2 * PATIENTS
    assert len(scans.samples) == PATIENTS
    assert scans.counts["scans"] == PATIENTS
    expected = volumes.scores_NL.reshape(PATIENTS, 2, -1).mean(axis=1)
    np.testing.assert_allclose(scans.scores_NL, expected)
    assert {sample.study for sample in scans.samples} == {s.study for s in volumes.samples}


def test_a_probe_reads_the_vectors_of_volumes(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    parts = [
        volume_shards(tmp_path / split, 8, shape=SHAPE, reconstructions=1, split=split, seed=seed)
        for seed, split in enumerate(("train", "validate"), 1)
    ]
    run = tmp_path / "run"
    run.mkdir()
    model = of_volumes(tokenizer).eval()
    save(model, run)
    command = ["eval", "probe", "--checkpoint", run, "--train", parts[0], "--valid", parts[1]]
    command += ["--test", folder, "--fractions", 1, "--resamples", 5, "--workers", 0]
    cli.main([str(word) for word in [*command, "--device", "cpu"]])
    assert read_results(run / "eval" / "probe").row("auroc@100%", "macro").n == 2 * PATIENTS
    probed = ProbedEncoder.from_model(model, name="hlip")
    loader = open_for_evaluation(ShardSource(folder), probed.transform, None, batch=5, workers=0)
    table = encode_features(probed, loader)
    whole = ShardSource(folder).volume(table.positions[3]).hu_DHW
    with torch.no_grad():
        expected_1D = model.image_encoder(model.transform([whole])).pooled_BD
    torch.testing.assert_close(table.x_ND[3:4], expected_1D, rtol=0, atol=1e-5)
    series = parts[0].parents[1]  # the original files
    for name, data, count in (("shards", folder, 2 * PATIENTS), ("files", series / "nifti", 8)):
        embed(run, [data], tmp_path / f"{name}.parquet", pooled=name == "shards", workers=0)
        rows = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")["embedding"].to_pylist()
        assert len(rows) == count
        if name == "shards":
            torch.testing.assert_close(torch.tensor(rows), table.x_ND, rtol=0, atol=1e-5)
    with raises(ConfigError, "unsupported", "checkpoint"):
        ProbedEncoder.from_model(fvlm(), name="fvlm")


@pytest.mark.parametrize("make", [of_images, of_volumes])
def test_commands_evaluate_volumes(
    make, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save(make(tokenizer), run)
    options = ["--checkpoint", run, "--data", folder, "--resamples", 5, "--workers", 0]
    options += ["--device", "cpu", "--slices", 3]
    command = ["eval", "zero-shot", *options, "--prompts", "hlip_volume", "--by-scan"]
    cli.main([str(word) for word in command])
    results = read_results(run / "eval" / "zero_shot")
    assert results.row("auroc", "macro").n > 0
    assert results.config["by_scan"]
    assert results.config.get("slices") == (3 if make is of_images else None)
    assert "data:image" in (run / "eval" / "zero_shot" / "index.html").read_text()
    command = ["eval", "retrieval", *options]
    cli.main([str(word) for word in command])
    results = read_results(run / "eval" / "retrieval")
    recalls = {row.metric for row in results.rows if row.metric.startswith("recall")}
    assert recalls == {"recall@5", "recall@10", "recall@50", "recall@100"}
    assert results.row("recall@10", "image_to_text").value == 1
    lines = (run / "eval" / "retrieval" / "predictions.jsonl").read_text().splitlines()
    texts = {json.loads(line)["text"] for line in lines}
    assert len(lines) == 2 * PATIENTS
    assert len(texts) <= PATIENTS, "reconstructions share a candidate"
