"""`rlx doctor`: check this machine, and whether a model fits into its memory."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.cache import KINDS, cached_files
from rlx.cli.options import Json, Loading, model_names, spread
from rlx.support import machine
from rlx.support.files import bytes_in, cache_directory
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.cli.programs import Subject

_LIBRARIES = ("numpy", "llvmlite", "ml_dtypes", "tokenizers", "jinja2")


@spread
def doctor(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Also check whether this model fits.", autocompletion=model_names
        ),
    ] = None,
    *,
    json: Json = False,
    loading: Loading,
) -> None:
    """Check this machine, and whether a model fits into its memory.

    Exit code 1 when something is wrong: native code does not run, or the model does not fit.
    """
    report = {"machine": _machine(loading.threads), "cache": _cache()}
    healthy = report["machine"]["native_code"] == "works"
    if name is not None:
        report["model"] = _model(name, loading)
        healthy = healthy and report["model"]["fits"]
    if json:
        console.write_json(report)
    else:
        for title, found in report.items():
            print(title)
            console.facts([(f"  {_label(k)}", _shown(k, v)) for k, v in found.items()])
    if not healthy:
        raise typer.Exit(1)


def _machine(threads: int | None) -> dict[str, Any]:
    from rlx.backends.registry import Device

    return {
        "rlx": _installed("rlx"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": machine.cpu_name(),
        **Device.of("cpu").backend.inspection().machine(threads),
        "memory_bytes": machine.total_memory(),
        "free_memory_bytes": machine.free_memory(),
        **_gpu(),
        "libraries": {name: _installed(name) for name in _LIBRARIES},
        "native_code": _try_native(),
    }


def _gpu() -> dict[str, Any]:
    """The first GPU, where there is one that can be used."""
    from rlx.backends.registry import Device, available_devices

    if "cuda" not in available_devices():
        return {}
    return Device.of("cuda").backend.inspection().machine()


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _try_native() -> str:
    """Compile a small graph and check its result."""
    import numpy as np

    from rlx.ir.module import GraphModule
    from rlx.runtime.session import Session

    def build(g: GraphModule) -> object:
        return g.linear(g.input("x", [2, 8]), g.param("w", [8, 4]), activation="relu")

    try:
        compiled = Session("cpu").compile(GraphModule.define("check", build))
        w = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
        x = np.linspace(-2, 1, 16, dtype=np.float32).reshape(2, 8)
        (y,) = compiled.set_param("w", w).run(x=x)
    except Exception as e:  # any failure is the report
        return f"{type(e).__name__}: {e}"
    return "works" if np.allclose(y, np.maximum(x @ w, 0), atol=1e-5) else "gives wrong results"


def _cache() -> dict[str, Any]:
    from rlx.formats.fetch import models_dir

    found: dict[str, Any] = {}
    files = cached_files()
    for kind in KINDS:
        place = cache_directory(kind)
        found[f"{kind}_directory"] = "off (RLX_CACHE=0)" if place is None else str(place)
        found[f"{kind}_bytes"] = sum(k.num_bytes for k in files if k.kind == kind)
    place = models_dir()
    return found | {"models_directory": str(place), "models_bytes": bytes_in(place)}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a model takes while it runs."""

    weights: int  # prepacked ones in place of their originals
    cache: int  # KV cache of the whole context
    working: int  # the largest arena

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def _model(name: str, loading: Loading) -> dict[str, Any]:
    from rlx.cli.programs import open_subject, parameters, weight_types

    start = time.perf_counter()
    subject = open_subject(name, loading.context, loading.kv)
    if subject.model is None:
        raise typer.BadParameter(f"{name} is IR, not a model")
    with console.working("planning"):
        use = _memory_use(subject, loading)
    planned = time.perf_counter() - start
    free, trained = machine.free_memory(), subject.model.config.context
    per_token = use.cache // subject.context
    room = free - use.weights - use.working
    largest = min(trained, room // per_token) if per_token else trained
    return {
        "file": str(subject.model.path),
        "file_bytes": bytes_in(subject.model.path),
        "architecture": subject.model.config.arch,
        "parameters": parameters(subject.model),
        "weights": weight_types(subject.model),
        "weight_bytes": use.weights,
        "cache_bytes_per_token": per_token,
        "context": subject.context,
        "cache_bytes": use.cache,
        "working_bytes": use.working,
        "needed_bytes": use.total,
        "fits": use.total <= free,
        "largest_context": max(0, largest) if room > 0 else 0,
        "trained_context": trained,
        "planned_in_seconds": round(planned, 2),
    }


def _memory_use(subject: Subject, loading: Loading) -> MemoryUse:
    """Sizes from the plans of the variants that the model runs."""
    from rlx.backends.registry import Device
    from rlx.cli.programs import binding_for
    from rlx.runtime.stages import Stages
    from rlx.specialize.options import CompileOptions

    arenas, weights, cache = [], 0, 0
    for variant in ("prefill:1", "decode:1") if subject.generates else ("encoder:1",):
        options = CompileOptions(binding=binding_for(subject, variant, []), threads=loading.threads)
        lir = Stages(subject.module, Device.of(loading.device).backend, options).lir
        arenas.append(lir.arena_size)
        weights = max(weights, sum(_bytes(node) for node in lir.params))
        cache = sum(_bytes(node) for node in lir.states)
    return MemoryUse(weights, cache, max(arenas))


def _bytes(node: Any) -> int:
    return int(node.output.shape.size_bytes)


def _label(key: str) -> str:
    return key.replace("memory_bytes", "memory").replace("_bytes", " size").replace("_", " ")


def _shown(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        if key == "weights":
            return ", ".join(f"{kind} {console.size(size)}" for kind, size in value.items())
        return ", ".join(f"{k} {v or 'missing'}" for k, v in value.items())
    if isinstance(value, list):
        return " ".join(value)
    if "bytes" in key and isinstance(value, int):
        return console.size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
