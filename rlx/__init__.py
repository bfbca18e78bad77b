"""RLX: an ML compiler and runtime. One symbolic model, every variant as native code.

    m = rlx.GraphModule.define("mlp", lambda g: g.linear(g.input("x", ["batch", 64]), w))
    f = rlx.Session("cpu").compile(m)
    y = f(x)

Names are loaded when first used, so that `import rlx` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlx.support.gc_pause import without_gc

# every public name and its module; `python tests/public_names.py` writes __init__.pyi from it
_HOMES = {
    "rlx.errors": (
        "ArrayCopyError ArrayTypeError ArrayValueError AttributeValueError AxisError "
        "BindingError BoolConversionError CodegenError DTypeError EngineClosedError FormatError "
        "IndexingError InputError NameConflictError NumericsError OptionError OutOfMemoryError "
        "ParseError QueueFullError RlxError ShapeError StageError UnsupportedError VerifyError"
    ),
    "rlx.ir.attrs": "Body Data MaskKind",
    "rlx.ir.binding": "DimBinding UpTo bind_graph",
    "rlx.ir.dim": "Dim sym",
    "rlx.ir.dtype": (
        "DType bf16 bool_ c128 c64 f16 f32 f64 f8e4m3 f8e5m2 i16 i32 i64 i8 promote u16 u32 u64 u8"
    ),
    "rlx.ir.graph": "Graph",
    "rlx.ir.hir": "Block FusionPolicy HirModule block",
    "rlx.ir.interp": "evaluate",
    "rlx.ir.lir": "Lir",
    "rlx.ir.module": "GraphModule GraphStage",
    "rlx.ir.node": "Node Origin Value",
    "rlx.ir.op": "Op op",
    "rlx.ir.phase": "Phase PhaseSchedule derive_phases",
    "rlx.ir.quant.scheme": "QuantScheme",
    "rlx.ir.shape": "Shape",
    "rlx.ir.text": "parse_graph parse_lir print_graph print_lir",
    "rlx.ir.verify": "verify",
    "rlx.specialize.manifest": "BindingManifest ManifestEntry",
    "rlx.specialize.options": "CompilationMode CompileOptions LayerComposition ModelComponent",
    "rlx.specialize.compile_profile": (
        "CompileProfile KernelDispatchConfig KernelDispatchPolicy KernelPolicy register_profile"
    ),
    "rlx.specialize.variant": "ModelPhase ModelVariant",
    "rlx.backends.registry": "Device available_devices register_backend",
    "rlx.models.encoder_model": "EncoderModel Ranked",
    "rlx.models.finetune.finetune": "FineTuned finetune",
    "rlx.models.finetune.history": "TrainingProgress",
    "rlx.models.finetune.trained_weights": "LoraConfig",
    "rlx.models.generation": "Generation",
    "rlx.models.batch.embed_batcher": "EmbedBatcher",
    "rlx.models.batch.engine": "Engine",
    "rlx.models.batch.engine_stats": "EngineStats",
    "rlx.models.batch.reply": "Chunk Reply",
    "rlx.models.language_model": "LanguageModel",
    "rlx.models.load": "load",
    "rlx.models.benchmark": "profile_model",
    "rlx.models.sampling": "GenerationSettings",
    "rlx.models.tune": "tune_model",
    "rlx.runtime.aot": "AotCache",
    "rlx.runtime.cache": "BucketedCompileCache CompileCache",
    "rlx.runtime.bundle": "Bundle compile_bundle load_bundle write_bundle",
    "rlx.runtime.compiled": "CompiledGraph",
    "rlx.runtime.pipeline": "ModelCompilePipeline",
    "rlx.runtime.params": "ParamStore",
    "rlx.runtime.session": "Session",
    "rlx.numpy.array": "Array",
    "rlx.numpy.array_op": "custom_op",
    "rlx.onnx.onnx_model": "OnnxModel",
    "rlx.pytorch.entry": "from_torch",
    "rlx.numpy.mapped_axis": "all_gather axis_index pmax pmean pmin psum",
    "rlx.numpy.control_flow": "cond fori_loop map scan switch while_loop",
    "rlx.numpy.device": "default_device",
    "rlx.numpy.function_file": "load_function",
    "rlx.optim.checkpoints": "CheckpointManager",
    "rlx.numpy.derivative_rules": "checkpoint custom_jvp custom_vjp stop_gradient",
    "rlx.numpy.differentiate": "grad hvp jvp value_and_grad vjp",
    "rlx.numpy.jacobians": "hessian jacfwd jacrev",
    "rlx.numpy.jit": "JitFunction debug jit",
    "rlx.numpy.tree": "tree_map",
    "rlx.numpy.vectorize": "vmap",
}

_ROOMS = (
    "data",
    "nn",
    "numpy",
    "onnx",
    "optim",
    "random",
)  # rooms that users name: `rlx.random.key(0)`
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # `import *` loads them all


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return globals().setdefault(name, _version())
    if name in _ROOMS:
        with without_gc():
            return import_module(f"rlx.{name}")
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    with without_gc():  # hundreds of modules, all to stay
        value = globals()[name] = getattr(import_module(module), name)
    return value


def _version() -> str:
    """The version in pyproject.toml: of the checkout, or else of the installed package."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == "rlx":
        return str(project["version"])
    try:
        return version("rlx")
    except PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS, "__version__"})
