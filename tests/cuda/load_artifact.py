"""Run a model from an artifact in a process without llvmlite: FOLDER ARTIFACT [stand-in].

Prints the tokens of a generation and of a request of an engine, and the seconds of the loading.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parity"), str(HERE.parent / "goldens")]
sys.modules["llvmlite"] = None  # type: ignore[assignment]


def main(folder: str, artifact: str) -> None:
    from checks_on_gpu import Letters

    import rlx
    from rlx.models.model_file import ModelFile

    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    prompt = "".join(chr(256 + 3 * i) for i in range(12))
    how = {"max_tokens": 3, "temperature": 0.8, "seed": 4}
    start = time.perf_counter()
    model = rlx.load(folder, device="cuda", artifact=artifact)
    first = model.generate(prompt, stream=False, **how).tokens
    seconds = time.perf_counter() - start
    model.close()
    with rlx.Engine(folder, device="cuda", artifact=artifact) as engine:
        second = engine.submit(prompt, **how).wait().tokens
    compiled = [m for m in sys.modules if m.startswith(("llvmlite.", "rlx.backends.cuda.kernels"))]
    print(json.dumps({"tokens": [first, second], "seconds": seconds, "compiled": compiled}))


if __name__ == "__main__":
    if sys.argv[3:] == ["stand-in"]:
        from fake_driver import FakeDriver, installed, make_stand_in

        from rlx.backends import registry

        with installed(FakeDriver()):
            registry._backends["cuda"] = make_stand_in()
            main(*sys.argv[1:3])
    else:
        main(*sys.argv[1:3])
