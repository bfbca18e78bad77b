# Made by tests/public_names.py from the table in __init__.py.
# ruff: noqa: I001
from rlx.errors import (
    ArrayCopyError as ArrayCopyError,
    ArrayTypeError as ArrayTypeError,
    ArrayValueError as ArrayValueError,
    AttributeValueError as AttributeValueError,
    AxisError as AxisError,
    BindingError as BindingError,
    BoolConversionError as BoolConversionError,
    CodegenError as CodegenError,
    DTypeError as DTypeError,
    EngineClosedError as EngineClosedError,
    FormatError as FormatError,
    IndexingError as IndexingError,
    InputError as InputError,
    NameConflictError as NameConflictError,
    NumericsError as NumericsError,
    OptionError as OptionError,
    OutOfMemoryError as OutOfMemoryError,
    ParseError as ParseError,
    QueueFullError as QueueFullError,
    RlxError as RlxError,
    ShapeError as ShapeError,
    StageError as StageError,
    UnsupportedError as UnsupportedError,
    VerifyError as VerifyError,
)
from rlx.ir.attrs import Body as Body, Data as Data, MaskKind as MaskKind
from rlx.ir.binding import DimBinding as DimBinding, UpTo as UpTo, bind_graph as bind_graph
from rlx.ir.dim import Dim as Dim, sym as sym
from rlx.ir.dtype import (
    DType as DType,
    bf16 as bf16,
    bool_ as bool_,
    c128 as c128,
    c64 as c64,
    f16 as f16,
    f32 as f32,
    f64 as f64,
    f8e4m3 as f8e4m3,
    f8e5m2 as f8e5m2,
    i16 as i16,
    i32 as i32,
    i64 as i64,
    i8 as i8,
    promote as promote,
    u16 as u16,
    u32 as u32,
    u64 as u64,
    u8 as u8,
)
from rlx.ir.graph import Graph as Graph
from rlx.ir.hir import (
    Block as Block,
    FusionPolicy as FusionPolicy,
    HirModule as HirModule,
    block as block,
)
from rlx.ir.interp import evaluate as evaluate
from rlx.ir.lir import Lir as Lir
from rlx.ir.module import GraphModule as GraphModule, GraphStage as GraphStage
from rlx.ir.node import Node as Node, Origin as Origin, Value as Value
from rlx.ir.op import Op as Op, op as op
from rlx.ir.phase import (
    Phase as Phase,
    PhaseSchedule as PhaseSchedule,
    derive_phases as derive_phases,
)
from rlx.ir.quant.scheme import QuantScheme as QuantScheme
from rlx.ir.shape import Shape as Shape
from rlx.ir.text import (
    parse_graph as parse_graph,
    parse_lir as parse_lir,
    print_graph as print_graph,
    print_lir as print_lir,
)
from rlx.ir.verify import verify as verify
from rlx.specialize.manifest import (
    BindingManifest as BindingManifest,
    ManifestEntry as ManifestEntry,
)
from rlx.specialize.options import (
    CompilationMode as CompilationMode,
    CompileOptions as CompileOptions,
    LayerComposition as LayerComposition,
    ModelComponent as ModelComponent,
)
from rlx.specialize.compile_profile import (
    CompileProfile as CompileProfile,
    KernelDispatchConfig as KernelDispatchConfig,
    KernelDispatchPolicy as KernelDispatchPolicy,
    KernelPolicy as KernelPolicy,
    register_profile as register_profile,
)
from rlx.specialize.variant import ModelPhase as ModelPhase, ModelVariant as ModelVariant
from rlx.backends.registry import (
    Device as Device,
    available_devices as available_devices,
    register_backend as register_backend,
)
from rlx.models.encoder_model import EncoderModel as EncoderModel, Ranked as Ranked
from rlx.models.finetune.finetune import FineTuned as FineTuned, finetune as finetune
from rlx.models.finetune.history import TrainingProgress as TrainingProgress
from rlx.models.finetune.trained_weights import LoraConfig as LoraConfig
from rlx.models.generation import Generation as Generation
from rlx.models.batch.embed_batcher import EmbedBatcher as EmbedBatcher
from rlx.models.batch.engine import Engine as Engine
from rlx.models.batch.engine_stats import EngineStats as EngineStats
from rlx.models.batch.reply import Chunk as Chunk, Reply as Reply
from rlx.models.language_model import LanguageModel as LanguageModel
from rlx.models.load import load as load
from rlx.models.benchmark import profile_model as profile_model
from rlx.models.sampling import GenerationSettings as GenerationSettings
from rlx.models.tune import tune_model as tune_model
from rlx.runtime.aot import AotCache as AotCache
from rlx.runtime.cache import (
    BucketedCompileCache as BucketedCompileCache,
    CompileCache as CompileCache,
)
from rlx.runtime.bundle import (
    Bundle as Bundle,
    compile_bundle as compile_bundle,
    load_bundle as load_bundle,
    write_bundle as write_bundle,
)
from rlx.runtime.compiled import CompiledGraph as CompiledGraph
from rlx.runtime.pipeline import ModelCompilePipeline as ModelCompilePipeline
from rlx.runtime.params import ParamStore as ParamStore
from rlx.runtime.session import Session as Session
from rlx.numpy.array import Array as Array
from rlx.numpy.array_op import custom_op as custom_op
from rlx.onnx.onnx_model import OnnxModel as OnnxModel
from rlx.pytorch.entry import from_torch as from_torch
from rlx.numpy.mapped_axis import (
    all_gather as all_gather,
    axis_index as axis_index,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    psum as psum,
)
from rlx.numpy.control_flow import (
    cond as cond,
    fori_loop as fori_loop,
    map as map,
    scan as scan,
    switch as switch,
    while_loop as while_loop,
)
from rlx.numpy.device import default_device as default_device
from rlx.numpy.function_file import load_function as load_function
from rlx.optim.checkpoints import CheckpointManager as CheckpointManager
from rlx.numpy.derivative_rules import (
    checkpoint as checkpoint,
    custom_jvp as custom_jvp,
    custom_vjp as custom_vjp,
    stop_gradient as stop_gradient,
)
from rlx.numpy.differentiate import (
    grad as grad,
    hvp as hvp,
    jvp as jvp,
    value_and_grad as value_and_grad,
    vjp as vjp,
)
from rlx.numpy.jacobians import hessian as hessian, jacfwd as jacfwd, jacrev as jacrev
from rlx.numpy.jit import JitFunction as JitFunction, debug as debug, jit as jit
from rlx.numpy.tree import tree_map as tree_map
from rlx.numpy.vectorize import vmap as vmap
from rlx import (
    data as data,
    nn as nn,
    numpy as numpy,
    onnx as onnx,
    optim as optim,
    random as random,
)

__version__: str
