"""The page in headless Chromium: by keyboard, on a phone, with two models, with a token.

The browser is that of MEDVL_BROWSER, or a Chromium or Chrome of the machine; without one the tests
are skipped.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from helpers.contrastive_systems import hlip
from helpers.label_shards import make_shards
from helpers.served import dicom, png, served, tiny_convirt, tiny_vqa
from helpers.volume_files import write_series

from medvl.data import train_wordpiece
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.serve import Gallery, ServeConfig, ServedModel, create_app
from medvl.serve.app import listen

playwright_api = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("MEDVL_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
WHY = f"none of {', '.join(NAMES)} is installed; install one, or name a Chromium in MEDVL_BROWSER"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=WHY)]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
TOKEN = "a-token-of-more-than-16"


def serving(app: Any) -> Iterator[str]:
    """Serve on a free port in a thread and yield the address."""
    with listen(ServeConfig(port=0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dual-encoder and a VQA model with a gallery."""
    models = [served(tiny_convirt(), "left"), served(tiny_vqa(), "right")]
    gallery = Gallery.build(
        make_shards(tmp_path_factory.mktemp("gallery")) / "train", models, limit=8
    )
    yield from serving(create_app(models, gallery, ServeConfig(requests_per_minute=10_000)))


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a server with a token and a small limit."""
    yield from serving(
        create_app([served(tiny_convirt())], None, ServeConfig(token=TOKEN, max_megabytes=1))
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that fails the test on an error in the console, such as a breach of the content
    security policy.
    """
    settings = getattr(request, "param", {"viewport": {"width": 1300, "height": 900}})
    context = browser.new_context(**settings)
    opened, errors = context.new_page(), []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on(
        "console",
        lambda message: (
            message.type == "error"
            and "status of" not in message.text
            and errors.append(message.text)
        ),
    )
    opened.set_default_timeout(20_000)
    yield opened
    context.close()
    assert not errors


def choose(page: Any, folder: Path, data: bytes, name: str = "image.dcm") -> None:
    (folder / name).write_bytes(data)
    page.set_input_files("#file", folder / name)


def shades(page: Any, number: int = 0) -> list[int]:
    """Red of some pixels of a canvas."""
    script = """(canvas) => Array.from({length: 9}, (_, i) => canvas.getContext("2d").getImageData(
        Math.floor(canvas.width * (0.1 + 0.1 * i)), Math.floor(canvas.height / 2), 1, 1).data[0])"""
    return page.locator("#panels canvas").nth(number).evaluate(script)


def test_everything_works_by_keyboard(two: str, page: Any, tmp_path: Path) -> None:
    page.goto(two)
    page.wait_for_selector("#models li >> nth=1")
    order = []
    for _ in range(9):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    assert order[:4] == ["Skip to the results", "file", "findings", "Score"]
    assert {"phrase", "question", "neighbors"} <= set(order)
    choose(page, tmp_path, dicom())
    page.wait_for_selector("#scores tbody tr")
    assert "DICOM · DX" in page.text_content("#facts")
    assert page.locator("#scores tbody tr").count() == 14
    page.focus("#findings")
    page.keyboard.type("Edema\nLarge left effusion")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#scores tbody tr >> nth=1")
    page.wait_for_function("() => document.querySelectorAll('#scores tbody tr').length === 2")
    assert "uncalibrated" in page.text_content("#scores")
    assert "Highest:" in page.text_content("#status")  # read aloud: aria-live
    assert page.get_attribute("#status", "aria-live") == "polite"
    before = shades(page)
    page.focus("#scores tbody tr:first-child button")
    page.keyboard.press("Space")
    page.wait_for_selector("#opacity:enabled")
    assert "Image with a heat map" in page.get_attribute("#panels canvas", "aria-label")
    with_map = shades(page)
    assert with_map != before
    page.focus("#opacity")
    page.keyboard.press("Home")
    assert shades(page) == before
    page.focus("#question")
    page.keyboard.type("Is there an effusion?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answers article")
    assert page.locator("#answers article").count() == 1  # of the model that can answer
    assert page.text_content("#answers .text") in ("yes", "no")
    page.focus("#neighbors")
    page.keyboard.press("Enter")
    page.wait_for_selector(".cards img")
    assert page.locator(".cards img").count() == 6


def test_windows_are_those_of_the_reader(two: str, page: Any, tmp_path: Path) -> None:
    page.goto(two)
    choose(page, tmp_path, dicom())
    page.wait_for_selector("#scores tbody tr")
    own = shades(page)
    row = 36 * 24
    expected = [
        round(255 * min(1, max(0, (row + 36 * int(64 * (0.1 + 0.1 * i)) - 1500) / 2000 + 0.5)))
        for i in range(9)
    ]
    assert max(abs(one - other) for one, other in zip(own, expected, strict=True)) <= 1
    page.focus("#center")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert sum(shades(page)) < sum(own) / 2
    page.check("#windowed")
    page.click("#findings-form button")
    page.wait_for_function(
        "() => document.querySelector('#scores caption').textContent.includes('window')"
    )
    page.click("#reset")
    assert shades(page) == own
    assert not page.is_checked("#windowed")


PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("page", [PHONE], indirect=True)
def test_page_fits_a_phone(two: str, page: Any, tmp_path: Path) -> None:
    page.goto(two)
    choose(page, tmp_path, png(), "photo.png")
    page.wait_for_selector("#scores tbody tr")
    page.tap("#scores tbody tr:first-child button")
    page.wait_for_selector("#opacity:enabled")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert (
        page.evaluate("document.querySelector('#panels canvas').getBoundingClientRect().bottom") > 0
    ), "in view again"
    small = page.evaluate(
        "[...document.querySelectorAll('button')].filter((b) => b.offsetHeight && "
        "b.offsetHeight < 32).length"
    )
    assert small == 0
    unlabelled = """[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length).length"""
    assert page.evaluate(unlabelled) == 0


def test_damaged_files_are_named_and_the_page_goes_on(two: str, page: Any, tmp_path: Path) -> None:
    page.goto(two)
    choose(page, tmp_path, b"no image")
    page.wait_for_selector("#alert:not([hidden])")
    assert "JPEG, PNG or DICOM" in page.text_content("#alert")
    choose(page, tmp_path, png(), "good.png")
    page.wait_for_selector("#scores tbody tr")
    assert page.is_hidden("#alert")


def test_token_comes_from_the_address_or_is_asked_for(
    guarded: str, page: Any, tmp_path: Path
) -> None:
    page.goto(guarded)
    page.wait_for_selector("#token-dialog[open]")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#models li")
    page.evaluate("sessionStorage.clear()")
    page.goto(f"{guarded}/#token={TOKEN}")
    page.reload()
    page.wait_for_selector("#models li")
    assert TOKEN not in page.url
    choose(page, tmp_path, bytes(1_200_000))
    page.wait_for_selector("#alert:not([hidden])")
    assert "over the limit of 1 MB" in page.text_content("#alert")


def test_slices_windows_and_maps_of_a_volume(page: Any, tmp_path: Path) -> None:
    """The wheel and the slider scroll, presets set the window, a map leads to its slice."""
    prompts = load_prompts("ct_clip")
    tokenizer = train_wordpiece(prompts.texts(), vocab_size=200)
    model = hlip(tokenizer=tokenizer, vocab_size=None).eval()
    hu = np.repeat(np.arange(-300, 300, 50, dtype=np.int16), 14 * 12).reshape(12, 14, 12)
    files = write_series(tmp_path / "series", hu)
    app = create_app([ServedModel("tiny", model, prompts)], None, ServeConfig())
    for address in serving(app):
        page.goto(address)
        page.wait_for_selector("#models li")
        page.set_input_files("#file", files)
        page.wait_for_selector("#scores tbody tr")
        assert "12 slices of 12 × 14 pixels" in page.text_content("#facts")
        assert page.text_content("#frame-value") == "7 of 12"
        page.click("#presets button >> text=Mediastinum")
        assert shades(page)[4] == pytest.approx(255 * (0.5 - 50 / 350), abs=1)  # of 0 HU
        page.hover("#panels canvas")
        page.mouse.wheel(0, 80)
        page.wait_for_function("() => document.getElementById('frame').value === '9'")
        assert shades(page)[4] == pytest.approx(255 * (0.5 + 50 / 350), abs=1)  # of 100 HU
        page.focus("#frame")
        page.keyboard.press("ArrowLeft")
        assert page.text_content("#frame-value") == "8 of 12"
        plain = shades(page)
        page.click("#scores tbody tr:first-child button")
        page.wait_for_selector("#opacity:enabled")
        caption = page.text_content("#panels figcaption")
        assert f"highest in slice {page.text_content('#frame-value')}" in caption
        assert shades(page) != plain
