"""A GGUF file as ONNX Runtime GenAI wants it: `python make_ort_genai.py FILE.gguf PRECISION`.

Run by the peer's Python; needs what `requirements-ort-genai.txt` lists. The folder is made once, in
a minute or two, and lies beside the file; its name is the answer: {"folder": path}.

The builder of ONNX Runtime GenAI reads no packed weights from GGUF: transformers unpacks them, the
builder packs them anew. PRECISION is int4, int8 or fp32; the other settings are its fastest for a
CPU: blocks of 32, activations in 8 bits, gate and up in one product, logits of the last token only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKED = ("accuracy_level=4", "block_size=32")
EVERY = ("fuse_mlp_gate_up=true", "prune_lm_head=true", "hf_token=false")


def unpack(path: Path, folder: Path) -> None:
    """Weights as floats, and the tokenizer, as transformers saves them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    AutoTokenizer.from_pretrained(**given).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**given)
    # floats by now, but still marked as what cannot be saved
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)


def build(floats: Path, folder: Path, precision: str) -> None:
    options = EVERY if precision == "fp32" else (*PACKED, *EVERY)
    places = ("-i", floats, "-o", folder, "-c", floats)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *places]
    command += ["-p", precision, "-e", "cpu", "--extra_options", *options]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the builder's own last line says why


def made(path: Path, precision: str) -> Path:
    folder = path.with_suffix(f".ort-genai-{precision}")
    mark = folder / "genai_config.json"
    if mark.exists() and mark.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return folder
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        floats, built = Path(work, "floats"), Path(work, "built")
        unpack(path, floats)
        build(floats, built, precision)
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)
    return folder


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = made(Path(sys.argv[1]).resolve(), sys.argv[2])
    print(json.dumps({"folder": str(found)}), flush=True)
