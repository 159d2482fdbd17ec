"""Volumes on the server: the same numbers as the model, in every form of upload, within limits."""

import base64
import copy
import io
import zipfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from helpers.contrastive_systems import fvlm, hlip
from helpers.errors import raises
from helpers.served import client, served, tiny_convirt
from helpers.volume_files import write_enhanced, write_series
from starlette.testclient import TestClient

import medvl
from medvl.data import train_wordpiece
from medvl.data.volumes.transform import OriginalVolumeTransform
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.inference.volumes import peak_of
from medvl.models.checkpoint import save
from medvl.serve import ServeConfig, ServedModel, open_models

PROMPTS = load_prompts("ct_clip")
MODEL = hlip(tokenizer=train_wordpiece(PROMPTS.texts(), vocab_size=200), vocab_size=None).eval()
TEXT = "Emphysema"


@pytest.fixture(scope="module")
def app() -> TestClient:
    config = ServeConfig(requests_per_minute=10_000, max_megabytes=1, max_voxels=4000)
    return client([ServedModel("tiny", MODEL, PROMPTS)], config=config)


HU = np.full((6, 14, 13), 40, np.int16)
HU[4:, :5, 8:] = 300


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A CT of soft tissue with one bright corner."""
    return [path.read_bytes() for path in write_series(tmp_path_factory.mktemp("ct"), HU)]


def zipped(files: list[bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", kind) as archive:
        for number, data in enumerate(files):
            archive.writestr(f"a/../../{number}.dcm", data)
    return content.getvalue()


def send(app: TestClient, route: str, files: list[bytes], *texts: str) -> Any:
    listed = [("image", ("x", data)) for data in files]
    return app.post(f"/api/{route}", files=listed, data={"text": list(texts)})


def test_a_series_and_its_archive_have_the_models_scores_and_map(
    app: TestClient, series: list[bytes], tmp_path: Path
) -> None:
    for number, data in enumerate(series):
        (tmp_path / f"{number}.dcm").write_bytes(data)
    expected = medvl.infer(MODEL, tmp_path, [TEXT], prompts="ct_clip")[TEXT]
    peak = peak_of(medvl.heatmap(MODEL, tmp_path, TEXT))
    enhanced = write_enhanced(tmp_path.with_suffix(".dcm"), HU, order=(3, 5, 0, 1, 4, 2))
    for files in (series, series[::-1], [zipped(series)], [enhanced.read_bytes()]):
        view = send(app, "view", files).json()
        assert view["warning"] is None
        assert (view["slices"], view["rows"], view["columns"]) == (6, 14, 13)
        values = np.frombuffer(base64.b64decode(view["values"]), "<i2")
        assert values.reshape(view["depth"], view["height"], view["width"])[5, 0, -1] == 300
        [model] = send(app, "scores", files, TEXT).json()["models"]
        assert model["result"][0]["score"] == pytest.approx(expected, abs=1e-6)
        [model] = send(app, "heatmap", files, TEXT).json()["models"]
        found = model["result"]
        codes = np.frombuffer(base64.b64decode(found["map"]), np.uint8).reshape(6, 14, 13)
        assert codes[peak] == codes.max()
        assert (codes == 0).sum() == 6 * 14 * 13 - 4 * 12 * 12  # outside of the model's cut
        assert found["peak"] == pytest.approx([(at + 0.5) / side for at, side in
                                               zip(peak[::-1], (13, 14, 6), strict=True)])  # fmt: skip


def test_a_series_of_another_modality_has_a_warning(app: TestClient, tmp_path: Path) -> None:
    paths = write_series(tmp_path / "a", np.full((4, 12, 12), 40), Modality="MR")
    view = send(app, "view", [path.read_bytes() for path in paths]).json()
    assert view["header"] == {"modality": "MR"}
    assert "MR; models for CT scans give meaningless results" in view["warning"]


def test_models_of_another_modality_read_nifti_files_of_it(app: TestClient, tmp_path: Path) -> None:
    """Their values are no Hounsfield units, and the page has no windows for these."""
    values = np.full((4, 12, 12), 3000, np.int16)
    nibabel.save(nibabel.Nifti1Image(values.T, np.diag([-1, -1, 1, 1])), tmp_path / "a.nii")
    files = [(tmp_path / "a.nii").read_bytes()]
    assert send(app, "view", files).json()["error"]["code"] == "not_hu"
    model = copy.deepcopy(MODEL)
    model.transform = OriginalVolumeTransform(size=MODEL.transform.size, shards_modality="MR")
    of_mr = client([ServedModel("tiny", model, PROMPTS)])
    view = send(of_mr, "view", files).json()
    assert view["header"] == {"modality": None}
    assert (view["format"], view["window"]["hounsfield"]) == ("NIfTI", False)
    assert send(of_mr, "scores", files, TEXT).status_code == 200


def test_uploads_beyond_the_limits_are_refused(app: TestClient, series: list[bytes]) -> None:
    def code(files: list[bytes]) -> tuple[int, str]:
        response = send(app, "view", files)
        return response.status_code, response.json()["error"]["code"]

    assert code([zipped([bytes(5_000_000)])]) == (413, "too_large")  # a bomb
    assert code([zipped([b"x"] * 4001)])[0] == 413
    assert code([bytes(2_000_000)])[0] == 413
    assert code([zipped(series)[:200]]) == (422, "malformed")
    encrypted = bytearray(zipped(series))
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    assert code([bytes(encrypted)]) == (422, "malformed")
    assert code([zipped([zipped(series)])]) == (422, "malformed")  # no archives inside of archives
    assert code(series[:1]) == (422, "too_small")
    assert code([series[0], *series[2:]]) == (422, "gap")
    assert code([b"\x89PNG"]) == (422, "malformed")
    big = client([ServedModel("tiny", MODEL, PROMPTS)], config=ServeConfig(max_voxels=100))
    assert send(big, "view", series).json()["error"]["code"] == "too_large"
    images = client([served(tiny_convirt())])
    assert send(images, "view", series[:2]).status_code == 400  # one file for models of images


def test_models_of_volumes_have_their_prompts_and_no_images_beside_them(tmp_path: Path) -> None:
    organs = fvlm(tokenizer=MODEL.tokenizer, vocab_size=None)
    for name, model in (("ct", MODEL), ("cxr", tiny_convirt()), ("organs", organs)):
        (tmp_path / name).mkdir()
        save(model, tmp_path / name)
    [opened] = open_models([tmp_path / "ct"], prompts="", device="cpu")
    assert opened.prompts.name == "ct_clip"
    assert opened.abilities == {
        "scores": True, "heatmap": True, "answer": False, "report": False, "neighbors": False
    }  # fmt: skip
    with raises(ConfigError, "conflict", "checkpoint"):
        open_models([tmp_path / "ct", tmp_path / "cxr"], prompts="", device="cpu")
    with raises(ConfigError, "unsupported", "checkpoint"):  # uploads have no masks of organs
        open_models([tmp_path / "organs"], prompts="", device="cpu")
    with raises(ConfigError, "unsupported", "all_tokens"):
        open_models([tmp_path / "ct"], prompts="", device="cpu", all_tokens=True)
    [opened] = open_models([tmp_path / "organs"], prompts="", device="cpu", all_tokens=True)
    assert opened.abilities["heatmap"]
    volume = Volume(hu_DHW=np.full((6, 14, 13), 40, np.int16), spacing=(1.0, 1.0, 1.0))
    assert opened.heatmap(volume, TEXT)["high"] < 1
    assert torch.is_grad_enabled()
