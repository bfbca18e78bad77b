"""RLX: an ML compiler and runtime. One symbolic model, every variant as native code.

    m = rlx.GraphModule.define("mlp", lambda g: g.linear(g.input("x", ["batch", 64]), w))
    f = rlx.Session("cpu").compile(m)
    (y,) = f.run(x=x)

Names are loaded when first used, so that `import rlx` costs next to nothing.
"""

# ruff: noqa: I001  (one statement per module below, not one per name)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.collector import without_gc

# where every public name lives; the imports at the end say the same to type checkers
_HOMES = {
    "rlx.errors": (
        "AttributeValueError BindingError CodegenError DTypeError FormatError InputError "
        "NameConflictError NumericsError OptionError ParseError RlxError ShapeError StageError "
        "UnsupportedError VerifyError"
    ),
    "rlx.ir.attrs": "Body Data MaskKind",
    "rlx.ir.binding": "DimBinding UpTo",
    "rlx.ir.dim": "Dim sym",
    "rlx.ir.dtype": (
        "DType bf16 bool_ c64 f16 f32 f64 f8e4m3 f8e5m2 i16 i32 i64 i8 promote u16 u32 u64 u8"
    ),
    "rlx.ir.graph": "Graph",
    "rlx.ir.hir": "Block HirModule block",
    "rlx.ir.interp": "evaluate",
    "rlx.ir.lir": "Lir",
    "rlx.ir.lowering": "FusionPolicy",
    "rlx.ir.module": "GraphModule GraphStage",
    "rlx.ir.node": "Node Value",
    "rlx.ir.op": "Op op",
    "rlx.ir.ops.custom": "custom_op",
    "rlx.ir.origin": "Origin",
    "rlx.ir.phase": "Phase PhaseSchedule derive_phases",
    "rlx.ir.quant": "QuantScheme",
    "rlx.ir.shape": "Shape",
    "rlx.ir.text": "parse_graph print_graph",
    "rlx.ir.verify": "verify",
    "rlx.passes.bind": "bind_graph",
    "rlx.specialize.component": "CompilationMode LayerComposition ModelComponent",
    "rlx.specialize.dispatch": "KernelDispatchConfig KernelPolicy",
    "rlx.specialize.manifest": "BindingManifest ManifestEntry",
    "rlx.specialize.options": "CompileOptions",
    "rlx.specialize.profile": "CompileProfile register_profile",
    "rlx.specialize.variant": "ModelPhase ModelVariant",
    "rlx.backends.registry": "Device available_devices register_backend",
    "rlx.models.encoder_model": "EncoderModel Ranked",
    "rlx.models.generation": "Generation",
    "rlx.models.batch.engine": "Engine",
    "rlx.models.language_model": "LanguageModel",
    "rlx.models.load": "load",
    "rlx.models.benchmark": "profile_model",
    "rlx.models.sampling": "GenerationSettings",
    "rlx.runtime.aot": "AotCache",
    "rlx.runtime.buckets": "BucketedCompileCache",
    "rlx.runtime.bundle": "Bundle compile_bundle load_bundle write_bundle",
    "rlx.runtime.cache": "CompileCache",
    "rlx.runtime.compiled": "CompiledGraph",
    "rlx.runtime.pipeline": "ModelCompilePipeline",
    "rlx.runtime.params": "ParamStore",
    "rlx.runtime.session": "Session",
}

_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if TYPE_CHECKING:
    from rlx.backends.registry import (
        Device as Device,
        available_devices as available_devices,
        register_backend as register_backend,
    )
    from rlx.errors import (
        AttributeValueError as AttributeValueError,
        BindingError as BindingError,
        CodegenError as CodegenError,
        DTypeError as DTypeError,
        FormatError as FormatError,
        InputError as InputError,
        NameConflictError as NameConflictError,
        NumericsError as NumericsError,
        OptionError as OptionError,
        ParseError as ParseError,
        RlxError as RlxError,
        ShapeError as ShapeError,
        StageError as StageError,
        UnsupportedError as UnsupportedError,
        VerifyError as VerifyError,
    )
    from rlx.ir.attrs import Body as Body, Data as Data, MaskKind as MaskKind
    from rlx.ir.binding import DimBinding as DimBinding, UpTo as UpTo
    from rlx.ir.dim import Dim as Dim, sym as sym
    from rlx.ir.dtype import (
        DType as DType,
        bf16 as bf16,
        bool_ as bool_,
        c64 as c64,
        f8e4m3 as f8e4m3,
        f8e5m2 as f8e5m2,
        f16 as f16,
        f32 as f32,
        f64 as f64,
        i8 as i8,
        i16 as i16,
        i32 as i32,
        i64 as i64,
        promote as promote,
        u8 as u8,
        u16 as u16,
        u32 as u32,
        u64 as u64,
    )
    from rlx.ir.graph import Graph as Graph
    from rlx.ir.hir import Block as Block, HirModule as HirModule, block as block
    from rlx.ir.interp import evaluate as evaluate
    from rlx.ir.lir import Lir as Lir
    from rlx.ir.lowering import FusionPolicy as FusionPolicy
    from rlx.ir.module import GraphModule as GraphModule, GraphStage as GraphStage
    from rlx.ir.node import Node as Node, Value as Value
    from rlx.ir.op import Op as Op, op as op
    from rlx.ir.ops.custom import custom_op as custom_op
    from rlx.ir.origin import Origin as Origin
    from rlx.ir.phase import (
        Phase as Phase,
        PhaseSchedule as PhaseSchedule,
        derive_phases as derive_phases,
    )
    from rlx.ir.quant import QuantScheme as QuantScheme
    from rlx.ir.shape import Shape as Shape
    from rlx.ir.text import parse_graph as parse_graph, print_graph as print_graph
    from rlx.ir.verify import verify as verify
    from rlx.passes.bind import bind_graph as bind_graph
    from rlx.models.encoder_model import EncoderModel as EncoderModel, Ranked as Ranked
    from rlx.models.generation import Generation as Generation
    from rlx.models.batch.engine import Engine as Engine
    from rlx.models.language_model import LanguageModel as LanguageModel
    from rlx.models.load import load as load
    from rlx.models.benchmark import profile_model as profile_model
    from rlx.models.sampling import GenerationSettings as GenerationSettings
    from rlx.runtime.aot import AotCache as AotCache
    from rlx.runtime.buckets import BucketedCompileCache as BucketedCompileCache
    from rlx.runtime.bundle import (
        Bundle as Bundle,
        compile_bundle as compile_bundle,
        load_bundle as load_bundle,
        write_bundle as write_bundle,
    )
    from rlx.runtime.cache import CompileCache as CompileCache
    from rlx.runtime.compiled import CompiledGraph as CompiledGraph
    from rlx.runtime.params import ParamStore as ParamStore
    from rlx.runtime.pipeline import ModelCompilePipeline as ModelCompilePipeline
    from rlx.runtime.session import Session as Session
    from rlx.specialize.component import (
        CompilationMode as CompilationMode,
        LayerComposition as LayerComposition,
        ModelComponent as ModelComponent,
    )
    from rlx.specialize.dispatch import (
        KernelDispatchConfig as KernelDispatchConfig,
        KernelPolicy as KernelPolicy,
    )
    from rlx.specialize.manifest import (
        BindingManifest as BindingManifest,
        ManifestEntry as ManifestEntry,
    )
    from rlx.specialize.options import CompileOptions as CompileOptions
    from rlx.specialize.profile import (
        CompileProfile as CompileProfile,
        register_profile as register_profile,
    )
    from rlx.specialize.variant import ModelPhase as ModelPhase, ModelVariant as ModelVariant
else:

    def __getattr__(name: str) -> Any:
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module 'rlx' has no attribute {name!r}")
        with without_gc():  # hundreds of modules, all to stay
            value = globals()[name] = getattr(import_module(module), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
