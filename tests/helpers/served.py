"""Tiny models behind the server, and requests to it."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi.testclient import TestClient

import medvl
from helpers.dicom_builder import image_dataset
from helpers.fusion_samples import tiny_model, tiny_tokenizer
from medvl.data import train_wordpiece
from medvl.data.images.codecs import encode_png
from medvl.eval.zero_shot_classification.calibration import Calibration
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.models import VQA
from medvl.models.base import System
from medvl.serve import ServeConfig, ServedModel, create_app

HOST = "http://localhost"
PLENTY = ServeConfig(requests_per_minute=100_000)


def tiny_convirt() -> System:
    """Return a dual-encoder of random weights whose prompts are words of its vocabulary."""
    tokenizer = train_wordpiece(load_prompts("chexpert_ensemble").texts(), vocab_size=200)
    sizes = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 64,
        "frozen_text_layers": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return medvl.create_model("convirt", tokenizer=tokenizer, **sizes).eval()


def tiny_vqa() -> VQA:
    """Return a model that answers questions, of random weights."""
    answering = VQA.on(tiny_model("dual_stream", tiny_tokenizer()), ("yes", "no"))
    answering.eval()
    return answering


def served(
    model: System, title: str = "tiny", calibration: Calibration | None = None
) -> ServedModel:
    """Return a model as the server has it."""
    return ServedModel(title, model, load_prompts("chexpert_pairs"), calibration)


def client(
    models: Sequence[ServedModel], gallery: Any = None, config: ServeConfig = PLENTY
) -> TestClient:
    """Return a client of a server on this machine."""
    return TestClient(create_app(models, gallery, config), base_url=HOST)


def png(seed: int = 0, side: int = 80) -> bytes:
    """Return a grey PNG of smooth noise."""
    rng = np.random.default_rng(seed)
    return encode_png(
        np.kron(
            rng.integers(0, 256, (8, 8), dtype=np.uint8), np.ones((side // 8, side // 8), np.uint8)
        )
    )


def dicom(pixels: np.ndarray | None = None, **fields: Any) -> bytes:
    """Return a 12-bit DICOM file with a window."""
    if pixels is None:
        pixels = (np.add.outer(np.arange(48), np.arange(64)) * 36).astype(np.uint16)
    window = {
        "BitsStored": 12,
        "HighBit": 11,
        "WindowCenter": 1500,
        "WindowWidth": 2000,
        "PatientName": "Secret^Name",
    }
    buffer = io.BytesIO()
    fields = {name: value for name, value in {**window, **fields}.items() if value is not None}
    image_dataset(pixels, **fields).save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def post(
    to: TestClient,
    route: str,
    data: bytes,
    texts: Sequence[str] = (),
    name: str = "image",
    **fields: Any,
) -> Any:
    """Send an image and return the response."""
    return to.post(
        f"/api/{route}", files={"image": (name, data)}, data={"text": list(texts), **fields}
    )


def checkpoint_of(model: System, folder: Path) -> Path:
    """Write a checkpoint as RUN/best and return RUN."""
    (folder / "best").mkdir(parents=True)
    medvl.models.save(model, folder / "best")
    return folder
