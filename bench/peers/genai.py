"""Peers that bring a pipeline of their own, each made ready before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.peers.pipe import Peer
from rlx.errors import InputError
from rlx.formats.gguf import GgufFile
from rlx.ir.quant.scheme import QuantScheme

Start = Callable[[], Peer]


def openvino_genai(python: str, path: str, threads: int) -> Start:
    """Reads the file itself, and asks it for its type, which not every file says."""
    with GgufFile(path) as file:
        if "general.file_type" not in file.metadata:
            raise InputError(
                "OpenVINO GenAI cannot read the file", where=path, got="no general.file_type",
                hint="`rlx quantize FILE.gguf OUT.gguf --type …` writes it, also of the same type",
            )  # fmt: skip
    needs = {"requirements": "requirements-genai.txt", "option": "--genai-python"}
    return partial(Peer, python, "openvino_genai_server.py", path, threads, **needs)


def ort_genai(python: str, path: str, threads: int, context: int, scheme: QuantScheme) -> Start:
    """Takes a folder that its builder made of the weights, in as many bits where it can."""
    needs = {"requirements": "requirements-ort-genai.txt", "option": "--ort-genai-python"}
    precision = "fp32" if scheme.is_float else "int4" if scheme.bits_per_element < 5 else "int8"
    with Peer(python, "make_ort_genai.py", path, precision, **needs) as maker:
        folder = maker.hello["folder"]
    return partial(Peer, python, "ort_genai_server.py", folder, threads, context, **needs)
