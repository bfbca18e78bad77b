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


class Opening:
    """A peer that runs a file, or does not."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def ask(self, do: str, **_: object) -> dict[str, object]:
        assert do == "open"
        return {"seconds": 0.5, **({"error": self.error} if self.error else {})}


def test_a_peer_that_cannot_run_a_file_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {"rlx": Opening(), "onnxruntime": Opening(), "openvino": Opening("no operator")}
    seconds = import_models.open_all(peers, "net", 1)  # type: ignore[arg-type]
    assert seconds == {"rlx": 0.5, "onnxruntime": 0.5} and list(peers) == list(seconds)
    assert "openvino: no operator" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="rlx: no operator"):
        import_models.open_all({"rlx": Opening("no operator")}, "net", 1)  # type: ignore[dict-item]


def test_8_bits_may_differ_by_steps() -> None:
    for net, fits in (("resnet50_qdq", True), ("resnet50", False)):
        peers = {"rlx": Engine([1.0, -1.98]), "onnxruntime": Engine([1.0, -2.0])}
        if fits:
            import_models.compare(peers, net)  # type: ignore[arg-type]
        else:
            with pytest.raises(SystemExit, match="rlx differs"):
                import_models.compare(peers, net)  # type: ignore[arg-type]
