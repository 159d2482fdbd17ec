"""Files of figure corpora in the published layouts."""

import csv
from pathlib import Path

import cv2

from helpers.mimic_files import textured
from medvl.data.convert.options import ShardOptions

SMALL = ShardOptions(short_side=32)


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), textured(seed, 40, 50))


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def xml(number: int = 1) -> bytes:
    return XML.format(number=number).encode()


XML = """<?xml version="1.0" encoding="utf-8"?>
<eCitation>
  <uId id="CXR{number}"/>
  <MedlineCitation><Article><Abstract>
    <AbstractText Label="COMPARISON">None.</AbstractText>
    <AbstractText Label="INDICATION"/>
    <AbstractText Label="FINDINGS">Heart &lt; 1/2. <b>XXXX</b>
      effusion&lt;BR&gt;on the left.</AbstractText>
    <AbstractText Label="IMPRESSION"> Effusion.</AbstractText>
  </Abstract></Article></MedlineCitation>
  <MeSH><major>Pleural Effusion/left</major><major>Opacity</major><automatic>effusion</automatic></MeSH>
  <parentImage id="CXR{number}_IM-0001-3001"><caption>PA
    view</caption></parentImage>
  <parentImage id="CXR{number}_IM-0001-4001"><caption/></parentImage>
</eCitation>
"""
