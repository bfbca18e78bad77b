"""The only file that calls LLVM: IR text to an object file or assembly. Imported late."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from rlx.errors import CodegenError
from rlx.llvm.target import Target


@cache
def _initialize(foreign: bool) -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    if foreign:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


@cache
def _machine(target: Target, level: int) -> Any:
    _initialize(target.arch != Target.host().arch)
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=",".join(target.features),
        opt=level,
        reloc="pic",
        codemodel="small",
        jit=False,
    )


def make_object(text: str, target: Target, opt: str, level: int) -> bytes:
    """Relocatable ELF object of a module's IR text."""
    machine, module = _prepare(text, target, opt, level)
    return bytes(machine.emit_object(module))


def make_assembly(text: str, target: Target, opt: str, level: int) -> str:
    """Assembly text of the same code."""
    machine, module = _prepare(text, target, opt, level)
    return str(machine.emit_assembly(module))


def _prepare(text: str, target: Target, opt: str, level: int) -> tuple[Any, Any]:
    machine = _machine(target, level)
    try:
        module = llvm.parse_assembly(text)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise _explained(text, error) from error
    if opt == "combine":
        _combine(module, machine)
    elif opt == "O2":
        _optimize(module, machine)
    return machine, module


def _combine(module: Any, machine: Any) -> None:
    """Instruction combining only: a few milliseconds."""
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_function_pass_manager()
    passes.add_instruction_combine_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)


def _optimize(module: Any, machine: Any) -> None:
    """The O2 pipeline without vectorisation and unrolling, which kernels have already."""
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.slp_vectorization = tuning.loop_vectorization = False
    tuning.loop_unrolling = tuning.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)


def _explained(text: str, error: RuntimeError) -> CodegenError:
    """LLVM's error with the lines around the one it names."""
    message = str(error).strip()
    found = re.search(r"<string>:(\d+):\d+: error: (.*)", message)
    if not found:
        return CodegenError("LLVM refuses the module", where="llvm", got=message[:2000])
    number, lines = int(found[1]), text.split("\n")
    shown = range(max(number - 3, 0), min(number + 2, len(lines)))
    around = "\n".join(f"  {i + 1:5}{'>' if i + 1 == number else ' '} {lines[i]}" for i in shown)
    return CodegenError(
        f"LLVM refuses line {number}: {found[2]}", where="llvm", origin=f"\n{around}"
    )
