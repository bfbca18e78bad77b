"""`python -m bench import`: what it says without its peers, and what its bars are."""

from __future__ import annotations

import numpy as np
import pytest

from bench import import_models
from bench.__main__ import main


class Engine:
    """A peer that answers with a fixed result."""

    def __init__(self, result: list[float]) -> None:
        self.result = result

    def ask(self, do: str, **_: object) -> dict[str, object]:
        assert do == "result"
        return {"result": self.result}


def test_without_the_peers_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--quick", "--peer-python", "/no/such/python"]) == 2
    assert "requirements-import.txt" in capsys.readouterr().err


def test_a_peer_with_another_result_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = Engine([1.0, -2.0]), Engine([1.0, np.nan])
    peers = {"rlx": right, "onnxruntime": right, "torch": wrong}
    import_models.compare(peers, "net")  # type: ignore[arg-type]
    assert list(peers) == ["rlx", "onnxruntime"]
    assert "torch differs" in capsys.readouterr().err


def test_our_own_result_must_be_right() -> None:
    peers = {"rlx": Engine([1.0, -2.1]), "onnxruntime": Engine([1.0, -2.0])}
    with pytest.raises(SystemExit, match="rlx differs"):
        import_models.compare(peers, "net")  # type: ignore[arg-type]
