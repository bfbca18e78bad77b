"""`rlx embed`, and encoders where commands expect a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx as api

TEXTS = ["the cat", "the cats!", "42"]
REFERENCE = ("--device", "reference")


@pytest.fixture(scope="module")
def expected(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with api.load(encoder, device="reference") as model:
            return model.embed(TEXTS)


def close(got: Any, wanted: Any) -> None:
    """NumPy's sums depend on where arrays lie in memory; the numbers are of size 1 in f32."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_a_vector_per_line(rlx: Any, encoder: Path, expected: Any) -> None:
    done = rlx("embed", encoder, *TEXTS, *REFERENCE)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    close(rows, expected)
    piped = rlx("embed", encoder, *REFERENCE, input="".join(f"{t}\n" for t in TEXTS))
    close([json.loads(line) for line in piped.stdout.splitlines()], expected)
    short = rlx("embed", encoder, TEXTS[0], *REFERENCE, "--dimensions", "3")
    close(json.loads(short.stdout), expected[0, :3])


def test_json_names_the_texts(rlx: Any, encoder: Path, expected: Any) -> None:
    found = json.loads(rlx("embed", encoder, *TEXTS, *REFERENCE, "--json").stdout)
    assert found["model"] == str(encoder)
    assert [e["text"] for e in found["embeddings"]] == TEXTS
    close(found["embeddings"][2]["vector"], expected[2])


def test_ranking(rlx: Any, encoder: Path, expected: Any) -> None:
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    scores = unit @ unit[0]
    order = np.argsort(-scores)
    command = ("embed", encoder, *TEXTS, *REFERENCE, "--query", TEXTS[0])
    found = json.loads(rlx(*command, "--json").stdout)
    assert [r["text"] for r in found] == [TEXTS[i] for i in order]
    close([r["score"] for r in found], scores[order])
    lines = rlx(*command).stdout.splitlines()
    assert lines[0] == "  1.0000  the cat"
    assert len(lines) == 3


def test_files_in_and_out(rlx: Any, encoder: Path, expected: Any, tmp_path: Path) -> None:
    source, made = tmp_path / "lines.txt", tmp_path / "out.npy"
    source.write_bytes("".join(f"{t}\r\n" for t in TEXTS).encode())
    done = rlx("embed", encoder, "-i", source, "-o", made, *REFERENCE)
    assert done.exit_code == 0, done.output
    assert "wrote 3 vectors" in done.stderr
    found = np.load(made)
    assert found.dtype == np.float32
    close(found, expected)
    rlx("embed", encoder, "-i", source, "-o", tmp_path / "out.jsonl", *REFERENCE)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    close([json.loads(line) for line in lines], expected)
    unit = json.loads(rlx("embed", encoder, TEXTS[0], "--normalize", *REFERENCE).stdout)
    assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-6)


def test_lines_that_are_no_text_leave_no_file(rlx: Any, encoder: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "lines.txt", tmp_path / "out.npy"
    source.write_bytes(b"the cat\n\xff\n")
    done = rlx("embed", encoder, "-i", source, "-o", made, *REFERENCE)
    assert done.exit_code == 1
    assert f"{source}, line 2] not UTF-8" in done.stderr
    assert not list(tmp_path.glob("out*"))
    assert rlx("embed", encoder, "a", "-o", tmp_path / "out.txt", *REFERENCE).exit_code == 2
    assert rlx("embed", encoder, "a", "-i", source, *REFERENCE).exit_code == 2
    assert rlx("embed", encoder, "a " * 99, "--overlong", "error", *REFERENCE).exit_code == 1


def test_places_that_cannot_be_written_are_refused_at_once(
    rlx: Any, encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.npy").mkdir()
    for place in (tmp_path / "nowhere" / "out.npy", tmp_path / "folder.npy"):
        done = rlx("embed", "no-such.gguf", "a", "-o", place)  # before the model is looked for
        assert done.exit_code == 2
        assert "[--output]" in done.stderr


def test_a_link_is_written_through(rlx: Any, encoder: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.npy", tmp_path / "target.NPY"
    target.write_bytes(b"old")
    link.symlink_to(target)
    assert rlx("embed", encoder, *TEXTS, "-o", link, *REFERENCE).exit_code == 0
    assert link.is_symlink()
    assert np.load(target).shape == (3, 32)


def test_no_lines_make_a_file_of_no_vectors(rlx: Any, encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_bytes(b"")
    command = ("embed", encoder, "-i", tmp_path / "none.txt", *REFERENCE)
    assert rlx(*command, "-o", tmp_path / "out.npy").exit_code == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 32)
    assert rlx(*command, "-o", tmp_path / "out.npy", "--dimensions", "5").exit_code == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 5)


def test_a_dash_is_standard_input(rlx: Any, encoder: Path, expected: Any) -> None:
    piped = rlx("embed", encoder, "-i", "-", *REFERENCE, input="the cat\n")
    close(json.loads(piped.stdout), expected[0])


@pytest.mark.parametrize(
    "options",
    [
        ("--query", "q", "--similarity"), ("--query", "q", "-o", "x.npy"),
        ("--similarity", "-o", "x.npy"), ("--json", "-o", "x.npy"),
        ("--query", "q", "--prompt", "p"), ("--query", "q", "--dimensions", "3"),
        ("--similarity", "--no-normalize"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(
    rlx: Any, encoder: Path, options: tuple[str, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rlx("embed", encoder, *TEXTS, *REFERENCE, *options)
    assert done.exit_code == 2
    assert "give one of them" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_path_to_nothing_is_no_text(rlx: Any) -> None:
    done = rlx("embed", "./no-such-model", "the cat")
    assert done.exit_code == 1
    assert "no such model" in done.stderr


def test_texts_of_several_lines_are_shown_in_one(rlx: Any, encoder: Path) -> None:
    command = ("embed", encoder, "the\ncat", "a", *REFERENCE)
    assert any(
        line.endswith("  the cat") for line in rlx(*command, "--query", "a").stdout.splitlines()
    )
    assert len(rlx(*command, "--similarity").stdout.splitlines()) == 3


def test_similarity_of_shorter_vectors(rlx: Any, encoder: Path, expected: Any) -> None:
    short = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    command = ("embed", encoder, *TEXTS, "--similarity", "--json", "--dimensions", "5")
    close(json.loads(rlx(*command, *REFERENCE).stdout)["similarity"], short @ short.T)


def test_similarity_at_a_glance(rlx: Any, encoder: Path, expected: Any) -> None:
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    found = json.loads(rlx("embed", encoder, *TEXTS, "--similarity", "--json", *REFERENCE).stdout)
    close(found["similarity"], unit @ unit.T)
    shown = rlx("embed", encoder, *TEXTS, "--similarity", *REFERENCE).stdout.splitlines()
    assert shown[1].split()[:2] == ["1", "1.000"]
    assert shown[3].endswith("42")


def test_the_default_encoder(rlx: Any, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "rlx.formats.fetch.resolve", lambda name, progress: asked.append(name) or encoder
    )
    assert rlx("embed", "the cat", *REFERENCE).exit_code == 0
    assert asked == ["all-minilm-l6-v2"]


def test_the_wrong_kind_of_model(rlx: Any, encoder: Path, tiny: Path) -> None:
    done = rlx("run", encoder, "Hi", *REFERENCE)
    assert done.exit_code == 1
    assert "an encoder does not generate text" in done.stderr
    assert rlx("embed", encoder, *REFERENCE, input="").exit_code == 2


def test_a_language_model_gives_vectors(rlx: Any, tiny: Path, encoder: Path) -> None:
    with api.load(tiny, device="reference") as model:
        mean, last = (model.embed(TEXTS, pooling=p) for p in ("mean", "last"))
    found = rlx("embed", tiny, *TEXTS, *REFERENCE)
    assert found.exit_code == 0, found.output
    close([json.loads(line) for line in found.stdout.splitlines()], mean)
    json_found = rlx("embed", tiny, *TEXTS, *REFERENCE, "--json", "--pooling", "last").stdout
    close([e["vector"] for e in json.loads(json_found)["embeddings"]], last)
    ranked = rlx("embed", tiny, *TEXTS, "--query", TEXTS[1], "--json", *REFERENCE)
    assert [r["text"] for r in json.loads(ranked.stdout)] == [
        TEXTS[i] for i in np.argsort(-(mean @ mean[1]))
    ]
    alike = rlx("embed", tiny, *TEXTS, "--similarity", "--json", *REFERENCE)
    close(json.loads(alike.stdout)["similarity"], mean @ mean.T)
    for option, model, part in (
        (("--dimensions", "3"), tiny, "--dimensions is for encoders"),
        (("--pooling", "first"), tiny, "unknown pooling"),
        (("--pooling", "last"), encoder, "the pooling of an encoder is fixed"),
    ):
        done = rlx("embed", model, "the cat", *REFERENCE, *option)
        assert done.exit_code == 2
        assert part in done.stderr


def test_encoders_are_inspected_and_measured(rlx: Any, encoder: Path) -> None:
    lir = rlx("inspect", encoder, "--stage", "lir", "--variant", "encoder:2x5", *REFERENCE).stdout
    assert '"ids": [2, 5] i32' in lir
    found = json.loads(rlx("inspect", encoder, "--json").stdout)
    assert found["architecture"] == "bert"
    assert found["sizes"] == f"{{batch: 1, seq: ≤{found['context']}}}"
    need = json.loads(rlx("doctor", encoder, *REFERENCE, "--json").stdout)["model"]
    assert need["cache_bytes"] == 0
    assert need["fits"] is True
    assert need["largest_context"] == need["trained_context"] == found["context"]


def test_artifacts_are_cached_and_checked(rlx: Any, encoder: Path, own_cache: Path) -> None:
    assert rlx("embed", encoder, "the cat").exit_code == 0  # natively, which stores what it made
    sizes = json.loads(rlx("cache", "size", "--json").stdout)
    assert sizes["artifacts"]["count"] > 0
    assert rlx("cache", "verify").exit_code == 0
    kept = [
        k for k in json.loads(rlx("cache", "list", "--json").stdout) if k["kind"] == "artifacts"
    ]
    victim = Path(next(k["path"] for k in kept if k["path"].endswith(".rlx")))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = rlx("cache", "verify")
    assert done.exit_code == 1
    assert str(victim) in done.stdout
    rlx("cache", "clear", "--yes")
    assert not victim.exists()
    after = json.loads(rlx("cache", "size", "--json").stdout)
    assert (after["artifacts"]["count"], after["kernels"]["count"]) == (0, 0)
