"""Every example runs, in a small form where it has one, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def printed(name: str, *arguments: object, folder: Path = ROOT) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_small_network() -> None:
    assert "logits (2, 9, 100)" in printed("small_network.py")


def test_kmeans() -> None:
    text = printed("kmeans.py", 5000, 4)
    # the points have a variance of 0.4² along each of two axes; the mean of 5000 is within 5 %
    assert number(r"distance ([\d.]+)", text) == pytest.approx(2 * 0.4**2, rel=0.05)
    assert text.endswith("traces: 1\n")


def test_mlp() -> None:
    text = printed("mlp.py", 800)
    assert number(r"([\d.]+) % of 2000", text) > 95
    assert text.endswith("traces of step: 1\n")


def test_image_filters(tmp_path: Path) -> None:
    text = printed("image_filters.py", "--out", "sheet.png", folder=tmp_path)
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    grey, blur, sharp = (number(rf"{n} +mean [\d.]+  spread ([\d.]+)", text)
                         for n in ("grey", "blur", "sharpen"))  # fmt: skip
    assert blur < grey < sharp  # of one picture
    picture = tmp_path / "picture.ppm"
    picture.write_bytes(b"P6\n4 3\n255\n" + bytes(range(36)))
    assert "4 x 3 pixels" in printed("image_filters.py", picture, folder=tmp_path)


def test_kalman() -> None:
    text = printed("kalman.py", 300)
    for line in text.splitlines()[:2]:
        found = [float(n) for n in re.findall(r"error ([\d.]+) measured, ([\d.]+)", line)[0]]
        assert found[1] < 0.6 * found[0]
    assert text.endswith("traces: 1\n")


def test_attention() -> None:
    text = printed("attention.py", 64)
    # sums of 64 products of numbers near 1, in another order: some ulp of f32
    assert all(float(n) < 5e-6 for n in re.findall(r"apart by (\S+)", text))
    assert len(re.findall("apart by", text)) == 3


def test_digits_cnn() -> None:
    text = printed("digits_cnn.py")
    # 98.16 % of the same images are right in PyTorch, whose weights these are, as floats of 32 bits
    assert number(r" 597 images in .*: ([\d.]+) %", text) == pytest.approx(98.16, abs=0.35)


def test_forecaster() -> None:
    text = printed("forecaster.py", 30)
    error, spread = number(r"error of the next 30 ([\d.]+)", text), number(r"spread ([\d.]+)", text)
    assert error < 0.3 * spread
    assert text.endswith("traces: 1\n")


def test_tiny_gpt() -> None:
    text = printed("tiny_gpt.py", "271828182845")
    assert text.startswith("271828182845 -> 112224578888\n")
    assert number(r"([\d.]+) % of 192 lists", text) > 95


@pytest.mark.slow
@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright"]], ids=lambda c: c[0])
def test_type_checkers_accept_the_examples(checker: list[str]) -> None:
    files = [str(ROOT / "examples" / name) for name in EXAMPLES]
    more = ["--pythonpath", sys.executable] if checker[0] == "pyright" else []
    done = subprocess.run(
        [sys.executable, "-m", *checker, *more, *files], capture_output=True, text=True, cwd=ROOT,
        check=False, env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'printed\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == set(EXAMPLES)
