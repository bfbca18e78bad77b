"""llama.cpp as a peer, behind the Python that has `llama-cpp-python`."""

from __future__ import annotations

from pathlib import Path

from rlx.cli.peers.pipe import Peer

_SERVER = Path(__file__).with_name("llama_cpp_server.py")


def start_llama_cpp(python: str, model: Path | str, threads: int, context: int) -> Peer:
    """The same model file in llama.cpp. What it can be asked stands in `llama_cpp_server.py`."""
    install = "-m pip install llama-cpp-python"
    return Peer(python, _SERVER, model, threads, context, install=install)
