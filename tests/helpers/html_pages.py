"""Parser of the HTML pages of evaluations."""

import re
from html.parser import HTMLParser
from pathlib import Path


class Reader(HTMLParser):
    """HTML parser that checks for balanced tags and collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.text.append(" ".join(data.split()))


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def check_resources(path: Path) -> None:
    """Assert that a page runs nothing and loads nothing, and that its links lead to its own
    parts and files.
    """
    reader = read(path)
    assert not {tag for tag, _ in reader.tags} & {
        "script",
        "link",
        "iframe",
        "object",
        "form",
        "base",
    }
    anchors = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    for tag, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "srcset", "action"):
            assert attributes.get(name, "data:image/").startswith("data:image/")
        if "href" in attributes:
            assert tag == "a"
            target = attributes["href"]
            assert (
                target[1:] in anchors
                if target.startswith("#")
                else (path.parent / target).stat().st_size
            )
        if tag == "img":
            assert len(attributes["alt"]) > 20, "it says what is seen"
    html = path.read_text(encoding="utf-8")
    assert "url(" not in html
    assert "http" not in re.sub(r"http-equiv|data:image[^\"]*", "", html)


VOID = {"img", "meta", "rect", "input"}  # rects close themselves
