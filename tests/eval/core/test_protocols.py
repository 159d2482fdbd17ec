"""Versions of protocols: the documented one is the recorded one."""

import ast
import re
from pathlib import Path

import medvl.eval

STATED = re.compile(r'"([a-z_]+)", version (\d+)')


def test_documented_versions_are_recorded() -> None:
    documented, recorded = {}, {}
    for path in Path(medvl.eval.__file__).parent.rglob("*.py"):
        text = path.read_text()
        documented |= {
            name: int(version)
            for name, version in STATED.findall(ast.get_docstring(ast.parse(text)) or "")
        }
        recorded |= {
            name: int(version)
            for name, version in re.findall(r'PROTOCOL = "([a-z_]+)"\n\w*VERSION = (\d+)', text)
        }
    assert documented
    assert {name: recorded.get(name) for name in documented} == documented
    assert documented.keys() >= {
        "report_generation",
        "masked_prediction",
        "image_text_matching",
        "class_retrieval",
    }
