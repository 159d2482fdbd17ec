"""HTML pages: complete, escaped, self-contained and equal to the results."""

import base64
import csv
import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_fakes import FakeLoader, FakeModel, make_source
from helpers.html_pages import check_resources, read
from PIL import Image

from medvl.errors import ImageError
from medvl.eval import load_prompts, write_zero_shot_page, zero_shot
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader, Results
from medvl.eval.html import plots
from medvl.eval.html.page import (
    JPEG,
    Card,
    Cards,
    Choice,
    ColorScale,
    Deck,
    Page,
    Picture,
    Pictures,
    Strip,
    header_facts,
    headline,
    thumbnail_uri,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, as_csv, as_latex, as_markdown
from medvl.eval.zero_shot_classification.protocol import ZeroShotResult

NAMES = ("Edema", "Fracture", "Pneumonia")


@pytest.fixture(scope="module")
def source():
    labels_NL = (np.random.default_rng(0).random((60, 3)) < 0.4).astype(float)
    labels_NL[:, 1] = 0  # Fracture has a single class
    return make_source(labels_NL, NAMES)


@pytest.fixture(scope="module")
def result(source) -> ZeroShotResult:
    valid = make_source(
        (np.random.default_rng(1).random((40, 3)) < 0.4).astype(float), NAMES, prefix="v"
    )
    prompts = load_prompts("chexpert_ensemble").select(NAMES)
    return zero_shot(
        FakeModel(), FakeLoader(source), prompts, valid_loader=FakeLoader(valid), resamples=20
    )


def noise(position: int) -> np.ndarray:
    return np.random.default_rng(position).integers(0, 256, (300, 200), dtype=np.uint8)


@pytest.fixture(scope="module")
def page(drawn_plots, result, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "new" / "index.html"
    return write_zero_shot_page(
        result, path, PageHeader(model="ConVIRT", data="Fake test", date="2026-01-31"), pixels=noise
    )


def test_page_shows_inputs_and_results(result, page):
    text = read(page).text
    joined = "\n".join(text)
    for expected in (
        "Zero-shot findings: ConVIRT",
        "Fake test, 60 images of 60 patients",
        "2026-01-31",
    ):
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
    check_resources(page)
    (policy,) = [
        attributes["content"] for _, attributes in read(page).tags if attributes.get("http-equiv")
    ]
    assert policy.startswith("default-src 'none'; img-src data:")


def test_pictures_have_alternative_text(page):
    images = [attributes for tag, attributes in read(page).tags if tag == "img"]
    plots = [image for image in images if image["src"].startswith("data:image/svg+xml")]
    thumbnails = [image for image in images if image["src"].startswith("data:image/jpeg")]
    assert len(plots) == 1 + 2 * 3  # Fracture has no curve
    assert len(thumbnails) == 2 * 3 * 3
    starts = {image["alt"].partition(":")[0] for image in plots}
    assert starts >= {
        "ROC curve of Edema",
        "Histograms of the scores for Edema",
        "Calibration of Pneumonia",
    }
    for image in plots:
        assert b"<svg" in base64.b64decode(image["src"].partition(",")[2])
    for image in thumbnails:
        picture = Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
        pixels = np.asarray(picture.convert("L"))
        assert pixels.std() > 5
        assert max(picture.size) == 192
        assert re.match(
            r"(image|.* view), (positive|negative) for \w+, score 0\.\d+ \(one of the ",
            image["alt"],
        )


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
    path = write_zero_shot_page(
        result, tmp_path / "page.html", PageHeader(model=hostile, data='"><b>', date=hostile)
    )
    reader = read(path)
    assert f"Zero-shot findings: {hostile}" in reader.text
    assert "script" not in {tag for tag, _ in reader.tags}
    table = Table(title=hostile, columns=["", hostile], rows=[[hostile, hostile]], caption=hostile)
    page = Page(
        title="",
        subtitle="",
        headlines=[(hostile,) * 3],
        facts=[(hostile,) * 2],
        sections=[table],
        limits=[hostile],
    )
    reader = read(write_page(page, tmp_path / "other.html"))
    assert reader.text.count(hostile) == 11
    assert "img" not in {tag for tag, _ in reader.tags}


def test_page_omits_unreadable_images(result, tmp_path, caplog):
    def broken(position: int) -> np.ndarray:
        if position % 2:
            raise ImageError("damaged", "truncated")
        return noise(position)

    path = write_zero_shot_page(
        result, tmp_path / "page.html", PageHeader(model="m", data="d"), pixels=broken
    )
    thumbnails = [
        a for tag, a in read(path).tags if tag == "img" and a["src"].startswith("data:image/jpeg")
    ]
    assert 0 < len(thumbnails) < 18
    assert "is left out of the page: it could not be read" in caplog.text


def test_page_omits_missing_metrics(source, tmp_path):
    prompts = dataclasses.replace(load_prompts("chexpert_ensemble"), scoring="margin").select(NAMES)
    result = zero_shot(
        FakeModel(), FakeLoader(source), prompts, resamples=0, smallest_subgroup=1000
    )
    path = write_zero_shot_page(result, tmp_path / "page.html", PageHeader(model="m", data="d"))
    text = "\n".join(read(path).text)
    for absent in (
        "Calibration",
        "Brier",
        "Threshold\n",
        "Subgroups",
        "Images\n",
        "Date",
    ):  # neither in the contents
        assert absent not in text
    assert "none (no validation images)" in text


def test_page_is_deterministic(result, page, tmp_path):
    again = write_zero_shot_page(
        result,
        tmp_path / "index.html",
        PageHeader(model="ConVIRT", data="Fake test", date="2026-01-31"),
        pixels=noise,
    )
    assert again.read_bytes() == page.read_bytes()
    files, first = (
        {path.name: path.read_bytes() for path in (of.parent / "index_files").iterdir()}
        for of in (again, page)
    )
    assert files == first


def test_plots_do_not_use_global_matplotlib_state():
    code = (
        "import sys; from medvl.eval import write_zero_shot_page; assert 'matplotlib' not in "
        "sys.modules\n"
        "import numpy as np; from medvl.eval.html import plots\n"
        "plots.score_plot('s', np.arange(4.0), np.array([0, 1, 0, 1.0]), None)\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_scores_that_differ_by_rounding_are_plotted():
    """Probabilities that a sigmoid rounds to 1 or to the number before; NumPy has no 24 bins
    between them.
    """
    plot = plots.score_plot(
        "s", np.array([1.0, np.nextafter(1, 0), 1.0]), np.array([0.0, 1.0, 1.0]), None
    )
    assert plot.svg.startswith(b"<?xml")


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
    facts = header_facts(
        results,
        PageHeader(model="m", data="d", date="today"),
        units="texts",
        extra=[("Maps", "cosine")],
    )
    assert facts == [
        ("Date", "today"),
        ("Checkpoint", f"m (sha256 {'ab' * 6})"),
        ("Data", "d"),
        ("Maps", "cosine"),
        ("Intervals", "95%, 1,000 resamples of texts, seed 7"),
        ("Protocol", "p, version 3"),
        ("Software", "medvl 1.2, torch ?"),
    ]
    assert (
        header_facts(results, PageHeader(model="m", data="d", date=None), units="texts")[0][0]
        == "Checkpoint"
    )
    row = MetricRow(metric="x", target="y", value=0.5, low=0.25, high=0.75)
    assert headline("X", row) == ("X", "0.500", "[0.250, 0.750]")
    assert headline("X", MetricRow(metric="x", target="y")) == ("X", "-", "")


def test_files_beside_the_page_hold_tables_and_plots(result, page):
    folder = page.parent / "index_files"
    row = result.results.row("auroc", "Edema")
    with (folder / "summary-by-finding.csv").open(newline="") as file:
        lines = {line["name"]: line for line in csv.DictReader(file)}
    assert [
        float(lines["Edema"][name]) for name in ("AUROC", "AUROC low", "AUROC high")
    ] == pytest.approx([row.value, row.low, row.high], abs=1e-5)
    assert (
        f"| Edema | {row.value:.3f} \\[{row.low:.3f}"
        in (folder / "summary-by-finding.md").read_text()
    )
    assert (
        f"Edema & {row.value:.3f} {{\\scriptsize ["
        in (folder / "summary-by-finding.tex").read_text()
    )
    for plot in ("roc-all", "roc-edema", "scores-edema", "calibration-edema"):
        assert (folder / f"{plot}.svg").read_bytes().startswith(b"<?xml")
        assert (folder / f"{plot}.pdf").read_bytes().startswith(b"%PDF")


def test_pictures_beside_the_page_are_those_of_the_page(result, page):
    folder = page.parent / "index_files"
    shown = [
        value["src"]
        for tag, value in read(page).tags
        if tag == "img" and value["src"].startswith(JPEG)
    ]
    (listed,) = folder.glob("*-pictures.csv")
    with listed.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(shown) > 0
    for row, source in zip(rows, shown, strict=True):
        assert (folder / row["file"]).read_bytes() == base64.b64decode(source.removeprefix(JPEG))
        assert row["alternative text"]


def test_heat_maps_of_strips_and_cards_are_linked_and_listed(tmp_path):
    noise_HW = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)
    scale = ColorScale(low="0.1", high="0.7")
    pictures = [
        Picture(
            source=thumbnail_uri(noise_HW),
            alternative="a map",
            lines=("Edema", "cosine"),
            scale=scale,
        ),
        Picture(source=thumbnail_uri(noise_HW.T.copy()), alternative="another"),
    ]
    card = Card(title="Case 1", pictures=pictures[:1], choices=(), lines=(), tags=())
    sections = [
        Pictures(title="Heat maps", strips=[Strip(title="Edema", pictures=pictures)]),
        Cards(title="Cases", decks=[Deck(title="Right", cards=[card], good=True)]),
    ]
    page = Page(title="", subtitle="", headlines=[], facts=[], sections=sections, limits=[])
    path = write_page(page, tmp_path / "index.html")
    files = sorted(file.name for file in (tmp_path / "index_files").iterdir())
    assert files == [
        "cases-pictures.csv",
        "heat-maps-001.jpg",
        "heat-maps-002.jpg",
        "heat-maps-pictures.csv",
    ]
    assert (tmp_path / "index_files" / files[3]).read_text().splitlines()[1] == (
        "heat-maps-001.jpg,Edema,a map,Edema | cosine,0.1 to 0.7"
    )
    assert "heat-maps-001.jpg,Right: Case 1," in (tmp_path / "index_files" / files[0]).read_text()
    links = [
        value["href"]
        for tag, value in read(path).tags
        if tag == "a" and value["href"].endswith(".jpg")
    ]
    assert links == [f"index_files/heat-maps-00{number}.jpg" for number in (1, 2, 1)]


def test_files_of_an_earlier_page_are_removed(tmp_path):
    def page(*titles: str) -> Page:
        tables = [Table(title=title, columns=["", "n"], rows=[["a", "1"]]) for title in titles]
        return Page(title="", subtitle="", headlines=[], facts=[], sections=tables, limits=[])

    path = write_page(page("One", "One", "Two"), tmp_path / "index.html")
    (path.parent / "index_files" / "notes.txt").touch()
    write_page(page("One"), path)
    assert sorted(file.name for file in (path.parent / "index_files").iterdir()) == [
        "notes.txt",
        "one.csv",
        "one.md",
        "one.tex",
    ]


def test_sections_beyond_the_first_screens_are_folded(tmp_path):
    table = Table(title="Long", columns=["", "n"], rows=[[str(row), "1"] for row in range(40)])
    shorter = dataclasses.replace(table, title="Short", rows=table.rows[:3])
    page = Page(
        title="", subtitle="", headlines=[], facts=[], sections=[table, table, shorter], limits=[]
    )
    reader = read(write_page(page, tmp_path / "index.html"))
    assert sum(tag == "details" for tag, _ in reader.tags) == 1, (
        "neither the summary nor what still fits"
    )
    assert [value["href"] for tag, value in reader.tags if tag == "a"][:3] == [
        "#long",
        "#long-1",
        "#short",
    ]


def test_rows_and_strips_can_be_filtered_by_finding(result, page):
    reader = read(page)
    options = [attributes["value"] for tag, attributes in reader.tags if tag == "option"]
    assert options == ["", *(str(number) for number in range(len(result.images.names)))]
    marked = [
        attributes["data-finding"]
        for tag, attributes in reader.tags
        if tag == "tr" and "data-finding" in attributes
    ]
    assert set(marked) == {"0", "1", "2"}
    assert page.read_text().count(':checked) [data-finding]:not([data-finding="') == len(
        result.images.names
    )


def test_long_texts_open_to_the_full_text(tmp_path):
    text = " ".join(f"word{number}" for number in range(60))
    card = Card(
        title=text,
        pictures=[],
        choices=[Choice(text=text, score=0.5, right=True)],
        lines=[("Its own", text)],
        tags=[],
    )
    cards = Cards(title="Cards", decks=[Deck(title="All", cards=[card], good=True)])
    page = Page(title="", subtitle="", headlines=[], facts=[], sections=[cards], limits=[])
    reader = read(write_page(page, tmp_path / "index.html"))
    assert reader.text.count(text) == 3
    assert sum(tag == "summary" for tag, _ in reader.tags) == 3


@pytest.mark.parametrize(
    ("values", "axis"),
    [
        ([(0.55, 0.6, 0.7), (0.9, 0.95, 0.99)], (0.5, 1.0)),
        ([(0.801, 0.81, 0.82)], (0.8, 0.822)),
        ([(-0.02, 0.01, 0.04)], (-0.03, 0.05)),
        ([(12.0, 14.0, 19.0)], (11.0, 20.0)),
        ([(0.5, 0.5, 0.5)], (0.46, 0.54)),
    ],
)
def test_bars_are_drawn_on_an_axis_around_their_values(values, axis):
    cells = [Cell(text="", interval=interval, bar=True) for interval in values]
    table = Table(title="", columns=["", "x", "n"], rows=[["a", cell, "3"] for cell in cells])
    (start, end), none = table.axes()
    assert none is None
    assert min(low for low, _, _ in values) >= start
    assert max(high for _, _, high in values) <= end
    assert (start, end) == pytest.approx(axis, abs=0.011)


def test_latex_and_markdown_escape_special_characters():
    table = Table(
        title="50% & more_",
        columns=["", "a|b"],
        rows=[["x_1", Cell(text="–")]],
        caption="#1",
        strong_rows=1,
    )
    latex = as_latex(table)
    assert r"\caption{50\% \& more\_. \#1}" in latex
    assert r"\textbf{x\_1} & \textbf{--} \\" in latex
    assert r" & a\textbar{}b \\" in latex
    assert r"| **x\_1** | **–** |" in as_markdown(table)
    assert r"a\|b" in as_markdown(table)
    assert as_csv(table) == "name,a|b\nx_1,–\n"


def test_columns_of_words_are_aligned_to_the_left() -> None:
    number = Cell(text="0.5", interval=(0.4, 0.5, 0.6))
    rows: list[list[Cell | str]] = [["a", "dual-encoder", number, "–"], ["b", "", "failed", "12"]]
    table = Table(title="T", columns=["", "family", "AUROC", "runs"], rows=rows)
    assert table.words() == [True, True, False, False]
    assert as_markdown(table).splitlines()[3] == "| --- | --- | ---: | ---: |"
    assert r"\begin{tabular}{llrr}" in as_latex(table)
    empty = Table(title="T", columns=["", "family"], rows=[])
    assert as_markdown(empty).splitlines()[3] == "| --- | ---: |"
