"""Help, names and letters of options: one meaning each, nothing that contradicts itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_app import commands

ALL = commands()


def option(path: str, letter: str) -> str | None:
    """The long name of an option of one letter."""
    command = dict(ALL)[tuple(path.split())]
    found = [p for p in command.params if letter in p.opts]
    return found[0].opts[0] if found else None


def test_q_quantises_everywhere() -> None:
    found = {" ".join(path): option(" ".join(path), "-q") for path, _ in ALL}
    assert {name for name in found.values() if name} == {"--quant", "--type"}
    for command in ("run", "chat", "embed", "compile", "profile", "bench", "quantize"):
        assert found[command] is not None, command


def test_what_is_required_has_no_default(rlx: Any) -> None:
    for path, command in ALL:
        for p in command.params:
            if p.required:
                assert p.default is None and not isinstance(p.show_default, str), (path, p.name)
        for part in re.split(r"\n│ +(?=\*|-|[A-Z]+ )", rlx(*path, "--help").stdout):
            assert not ("[required]" in part and "[default" in part), part


@pytest.mark.parametrize(
    "odd", ["none of them is", "rung", "It is code.", "of -.", "Largest batch"]
)
def test_sentences_that_puzzled_readers_are_gone(rlx: Any, odd: str) -> None:
    for path, _ in ALL:
        assert odd not in " ".join(rlx(*path, "--help").stdout.split()), path


def test_devices_are_named_in_help(rlx: Any) -> None:
    for name in ("run", "embed", "bench"):
        assert re.search(r"cpu, cuda \(an NVIDIA GPU\)", rlx(name, "--help").stdout)


def test_a_device_that_there_is_not(rlx: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.backends import registry

    monkeypatch.setattr(registry, "_count", lambda name: 0)
    done = rlx("run", "--device", "gpu", tiny, "x")
    assert done.exit_code == 2
    # a device of other tests may stand between
    assert re.search(r"unknown device; got 'gpu'; expected cpu, .*reference", done.stderr)
    assert "cuda," not in done.stderr
    assert 'an NVIDIA GPU is "cuda", but no driver finds one here' in done.stderr
    assert "did you mean cpu" not in done.stderr
    monkeypatch.setattr(registry, "_count", lambda name: 1)
    done = rlx("run", "--device", "nvidia", tiny, "x")
    assert re.search(r"expected cpu, cuda, .*reference", done.stderr) and '"cuda:1"' in done.stderr
    done = rlx("run", "--device", "cpx", tiny, "x")
    assert "did you mean cpu?" in done.stderr
