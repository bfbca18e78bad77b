"""Every example runs, in a small form where it has one, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import wave
from pathlib import Path
from xml.etree import ElementTree

import pytest
from safetensors.numpy import load_file

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


def test_file_types() -> None:
    text = printed("file_types.py")
    found = dict(line.split(" (")[0].split(": ") for line in text.splitlines())
    assert found == {
        "README.md": "markdown", "pyproject.toml": "toml", "errors.py": "python",
        "architecture.svg": "svg", "chat.png": "png",
    }  # fmt: skip


def test_voice_activity(tmp_path: Path) -> None:
    text = printed("voice_activity.py")
    first, last = (number(rf"{n} ([\d.]+)", text) for n in ("from", "to"))
    # vowels from 1 to 3 s; a step is 0.03 s, and the model waits a little before it says no
    assert abs(first - 1.0) < 0.1 and -0.1 < last - 3.0 < 0.4
    silence = tmp_path / "silence.wav"
    with wave.open(str(silence), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(bytes(32000))
    assert printed("voice_activity.py", silence) == "0% of 1.0 s\n"


def test_text_in_image() -> None:
    assert printed("text_in_image.py") == "Any model, any size\nnative code in milliseconds\n"


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


def test_digits_cnn(tmp_path: Path) -> None:
    text = printed("digits_cnn.py", 12, "--save", "digits.safetensors", folder=tmp_path)
    # 98 % with this seed and others; one image in 597 is 0.17 %
    assert number(r"([\d.]+) % of 597 images", text) > 97
    weights = load_file(tmp_path / "digits.safetensors")
    assert weights["0.weight"].shape == (16, 1, 3, 3)
    # the running statistics are of 20 batches an epoch
    assert weights["1.num_batches_tracked"] == 240


def test_forecaster() -> None:
    text = printed("forecaster.py", 300)
    for known in (60, 120):
        error, spread = re.findall(rf"{known} values known.* ([\d.]+); spread ([\d.]+)", text)[0]
        assert float(error) < 0.75 * float(spread)  # the mean has 1; a wave of another phase 1.4
    assert text.endswith("traces: 1\n")


def test_tiny_gpt(tmp_path: Path) -> None:
    small = ("--width", 64, "--layers", 2, "--context", 64)
    whole = printed("tiny_gpt.py", 40, *small)
    # bytes of English, each by its own frequency, have 3.4 nats; all alike have 5.5
    assert number(r"not seen ([\d.]+)", whole) < 3.4
    assert re.search(r"^The .{150}", whole, re.MULTILINE | re.DOTALL)
    first = printed("tiny_gpt.py", 20, *small, "--folder", "run", folder=tmp_path)
    second = printed("tiny_gpt.py", 40, *small, "--folder", "run", folder=tmp_path)
    assert "going on at step 20" in second
    weights = [re.findall(r"weights (\w+)", text) for text in (whole, first, second)]
    assert weights[0] == weights[2] != weights[1]


def test_pendulum(tmp_path: Path) -> None:
    text = printed("pendulum.py", 300, "--out", "paths.svg", folder=tmp_path)
    off = {name: number(rf"{name} +energy off by +([\d.]+)", text)
           for name in ("hamiltonian", "plain")}  # fmt: skip
    assert off["hamiltonian"] < 5 and off["hamiltonian"] < off["plain"] / 2
    # Liouville's theorem, up to the steps of the integration: 2e-6 each at most
    assert number(r"hamiltonian .*area times ([\d.]+)", text) == pytest.approx(1, abs=5e-4)
    assert number(r"swings ([\d.]+)", text) == pytest.approx(1, abs=0.2)
    drawn = ElementTree.parse(tmp_path / "paths.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 3


def test_finetune_smollm2() -> None:
    text = printed("finetune_smollm2.py", "smollm2-135m", 10)
    assert number(r"loss [\d.]+ to ([\d.]+)", text) < number(r"loss ([\d.]+) to", text) / 2
    before, after = (re.search(rf"{name}: +(.*)", text) for name in ("before", "after"))
    assert before and after and "Ahoy" not in before[1] and after[1].startswith("Ahoy, matey!")


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
