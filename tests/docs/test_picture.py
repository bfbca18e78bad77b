"""The picture of the architecture is what its script draws, and names folders there are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from blocks import ROOT
from picture import PICTURE, STOPS, draw


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "run python tests/docs/picture.py"
    ElementTree.fromstring(draw())


def test_it_names_what_there_is() -> None:
    for stop in STOPS:
        for place in re.findall(r"[a-z_]+/[a-z_]+|^[a-z]+", stop.folder):
            path = ROOT / "rlx" / place
            assert path.is_dir() or path.with_suffix(".py").exists(), place
