"""HTML pages: complete, escaped, self-contained and equal to the results."""

import base64
import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_fakes import FakeLoader, FakeModel, make_source
from helpers.html_pages import read
from PIL import Image

from medvl.errors import ImageError
from medvl.eval import load_prompts, write_zero_shot_page, zero_shot
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import Results
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import Page, Table, write_page
from medvl.eval.zero_shot_classification.evaluate import ZeroShotResult

NAMES = ("Edema", "Fracture", "Pneumonia")


@pytest.fixture(scope="module")
def source():
    labels_NL = (np.random.default_rng(0).random((60, 3)) < 0.4).astype(float)
    labels_NL[:, 1] = 0  # Fracture has a single class
    return make_source(labels_NL, NAMES)


@pytest.fixture(scope="module")
def result(source) -> ZeroShotResult:
    valid = make_source((np.random.default_rng(1).random((40, 3)) < 0.4).astype(float), NAMES, prefix="v")
    prompts = load_prompts("chexpert_ensemble").select(NAMES)
    return zero_shot(FakeModel(), FakeLoader(source), prompts, valid_loader=FakeLoader(valid), resamples=20)


def noise(position: int) -> np.ndarray:
    return np.random.default_rng(position).integers(0, 256, (300, 200), dtype=np.uint8)


@pytest.fixture(scope="module")
def page(result, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "new" / "index.html"
    return write_zero_shot_page(result, path, model="ConVIRT", data="Fake test", date="2026-01-31", pixels=noise)


def test_page_shows_inputs_and_results(result, page):
    text = read(page).text
    joined = "\n".join(text)
    for expected in ("Zero-shot findings: ConVIRT", "Fake test, 60 images of 60 patients", "2026-01-31"):
        assert expected in joined
    assert f"chexpert_ensemble, version 1 (sha256 {result.prompts.sha256[:12]})" in joined
    assert "no finding: implied, uncertain: ignore, missing: negative" in joined
    assert "95%, 20 resamples of patients, seed 0" in joined
    assert "not for clinical use" in joined
    row = result.results.row("auroc", "Edema")
    assert f"{row.value:.3f}" in text
    assert f"[{row.low:.3f}, {row.high:.3f}]" in text
    assert f"{result.thresholds['Edema']:.3f}" in text
    assert "sex: F" in text


def test_page_loads_no_resources_and_no_scripts(page):
    reader = read(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "form", "base"}
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "data:image/").startswith("data:image/")
    assert "url(" not in page.read_text()
    assert "http" not in re.sub(r"http-equiv|data:image[^\"]*", "", page.read_text())
    (policy,) = [attributes["content"] for _, attributes in reader.tags if attributes.get("http-equiv")]
    assert policy.startswith("default-src 'none'; img-src data:")


def test_pictures_have_alternative_text(page):
    images = [attributes for tag, attributes in read(page).tags if tag == "img"]
    plots = [image for image in images if image["src"].startswith("data:image/png")]
    thumbnails = [image for image in images if image["src"].startswith("data:image/jpeg")]
    assert len(plots) == 2 * 3  # Fracture has no curve
    assert len(thumbnails) == 2 * 3 * 3
    assert {image["alt"] for image in plots} >= {"Edema: ROC curve", "Pneumonia: calibration"}
    for image in images:
        picture = Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
        pixels = np.asarray(picture.convert("L"))
        assert pixels.std() > 5
        if image in thumbnails:
            assert max(picture.size) == 192
            assert image["alt"].startswith("image p-")


def test_gallery_shows_images_with_extreme_scores(result, page):
    text = read(page).text
    scores, labels = result.images.scores_NL[:, 0], result.images.labels_NL[:, 0]
    assert result.images.names[0] == "Edema"
    start = text.index("highest scores, positive")
    assert text[start + 1] == f"{scores[labels == 1].max():.3f}, positive"
    start = text.index("highest scores, negative")
    assert text[start + 1] == f"{scores[labels == 0].max():.3f}, negative"
    start = text.index("lowest scores, positive")
    assert text[start + 1] == f"{scores[labels == 1].min():.3f}, positive"


@pytest.mark.fault("S14")
def test_page_escapes_text(result, tmp_path):
    hostile = "<script>alert('x')</script><img src=x onerror=alert(1)>&"
    path = write_zero_shot_page(result, tmp_path / "page.html", model=hostile, data='"><b>', date=hostile)
    reader = read(path)
    assert f"Zero-shot findings: {hostile}" in reader.text
    assert "script" not in {tag for tag, _ in reader.tags}
    table = Table(title=hostile, columns=[hostile], rows=[[hostile, hostile]], caption=hostile)
    page = Page(
        title="", subtitle="", headlines=[(hostile,) * 3], facts=[(hostile,) * 2], sections=[table], limits=[hostile]
    )
    reader = read(write_page(page, tmp_path / "other.html"))
    assert reader.text.count(hostile) == 11
    assert "img" not in {tag for tag, _ in reader.tags}


def test_page_omits_unreadable_images(result, tmp_path, caplog):
    def broken(position: int) -> np.ndarray:
        if position % 2:
            raise ImageError("damaged", "truncated")
        return noise(position)

    path = write_zero_shot_page(result, tmp_path / "page.html", model="m", data="d", pixels=broken)
    thumbnails = [a for tag, a in read(path).tags if tag == "img" and a["src"].startswith("data:image/jpeg")]
    assert 0 < len(thumbnails) < 18
    assert "is left out of the page: it could not be read" in caplog.text


def test_page_omits_missing_metrics(source, tmp_path):
    prompts = dataclasses.replace(load_prompts("chexpert_ensemble"), scoring="margin").select(NAMES)
    result = zero_shot(FakeModel(), FakeLoader(source), prompts, resamples=0, smallest_subgroup=1000)
    path = write_zero_shot_page(result, tmp_path / "page.html", model="m", data="d")
    text = "\n".join(read(path).text)
    for absent in ("Calibration", "Brier", "Threshold\n", "Subgroups", "Images\n", "Date"):
        assert absent not in text
    assert "none (no validation images)" in text


def test_page_is_deterministic(result, page, tmp_path):
    again = write_zero_shot_page(
        result, tmp_path / "page.html", model="ConVIRT", data="Fake test", date="2026-01-31", pixels=noise
    )
    assert again.read_bytes() == page.read_bytes()


def test_plots_do_not_use_global_matplotlib_state():
    code = (
        "import sys; from medvl.eval import write_zero_shot_page; assert 'matplotlib' not in sys.modules\n"
        "import numpy as np; from medvl.eval.html import plots\n"
        "plots.score_plot(np.arange(4.0), np.array([0, 1, 0, 1.0]), None)\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_statistics_import_without_torch():
    code = "import sys; from medvl.eval import bootstrap_auroc; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_header_facts_list_inputs_intervals_and_protocol():
    results = Results(
        protocol="p",
        protocol_version=3,
        rows=(),
        config={"resamples": 1000, "seed": 7},
        inputs={"checkpoint": "ab" * 32, "manifest": None},
        packages={"medvl": "1.2"},
    )
    facts = header_facts(results, model="m", data="d", date="today", units="texts", extra=[("Maps", "cosine")])
    assert facts == [
        ("Date", "today"),
        ("Checkpoint", f"m (sha256 {'ab' * 6})"),
        ("Data", "d"),
        ("Maps", "cosine"),
        ("Intervals", "95%, 1,000 resamples of texts, seed 7"),
        ("Protocol", "p, version 3"),
        ("Software", "medvl 1.2, torch ?"),
    ]
    assert header_facts(results, model="m", data="d", date=None, units="texts")[0][0] == "Checkpoint"
    row = MetricRow(metric="x", target="y", value=0.5, low=0.25, high=0.75)
    assert headline("X", row) == ("X", "0.500", "[0.250, 0.750]")
    assert headline("X", MetricRow(metric="x", target="y")) == ("X", "-", "")
