"""Static estimates of the hot loops of kernels, for CPUs that are not at hand: needs llvm-mca.

A kernel is compiled for each CPU. In every function the loop with the most multiply-adds is found,
and around it the loops up to the first whose number of iterations is not a constant; LLVM's model
of the CPU then says how many cycles an iteration takes with all data in the L1 cache. Such a model
knows ports and latencies, but neither caches nor the branch predictor: it tells which of two codes
is the better one, not how fast a machine is. Apple's cores have no model in LLVM: it takes that of
an older one, with three vector pipes instead of four.

LLVM's models have no figures for AMX. Loads and stores of tiles are estimated as those of their
rows; a product takes the 16 cycles that Intel's 1024 multiply-adds of bytes per cycle come to, in a
unit of its own. Two figures bound what that gives: products one after the other with all else, and
at the same time.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.common import arguments
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.spec import KernelSpec, unit_of
from rlx.backends.cpu.layouts.quant_tiles import TILE_COLUMNS
from rlx.backends.cpu.lowering import Context, lower_graph
from rlx.ir.binding import DimBinding, bind_graph
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape
from rlx.llvm.amx import TILE_ROWS
from rlx.llvm.target import Target
from rlx.passes.pipeline import run_pipeline
from rlx.passes.plan import plan
from rlx.support.records import dataclass

WITHOUT_TILES = "… without AMX"
TARGETS = ("znver3", "znver4", "alderlake", "sapphirerapids", WITHOUT_TILES, "aarch64",
           "neoverse-n1", "neoverse-v1", "neoverse-v2", "apple-m1", "apple-m2")  # fmt: skip
# CPUs of targets that are no CPU of their own
_CPUS = {"aarch64": "cortex-a72", "apple-m2": "apple-m1"}
_PROGRAMS = (*(f"llvm-mca-{v}" for v in range(25, 15, -1)), "llvm-mca")  # the newest
_ITERATIONS = 100
_MOST_TRIPS = 64  # of a loop that is written out
_SETS_FLAGS = r"(f?c?cmpe?|cmn|subs|adds|tst|test)[a-z]*\s"
_TILE_CYCLES = 16  # of a product of tiles
_MOST_INSTRUCTIONS = 20_000  # of one unrolled iteration

# the instruction that multiplies, its multiply-adds per 128 bits, and the shape of its operands;
# of those that a loop has the first one counts, as the others then scale or widen
_MULTIPLIES = (
    # 32 codes of k, or 64 as one of two planes of bytes
    (r"tdpb[su][su]d|tdpbf16ps", TILE_ROWS * TILE_COLUMNS * 32),
    (r"[us]*mmla\s+v\d+\.4s", 32),
    (r"[us]dot\s+v\d+\.4s", 16),
    (r"smull2?\s+v\d+\.8h", 8),
    (r"vpdpbusd", 16),
    (r"vpmaddubsw", 16),
    (r"vdpbf16ps|bfdot|bfmmla", 8),
    (r"vpmaddwd", 8),
    (r"fml[as]\s+v\d+\.4s|vfn?m(add|sub)\d+ps", 4),
)


@dataclass(frozen=True)
class Estimate:
    """What an iteration of a loop takes."""

    instructions: int
    multiplies: int
    cycles: float
    tile_cycles: int = 0

    @property
    def per_cycle(self) -> float:
        """Multiply-adds, at the least."""
        return self.multiplies / (self.cycles + self.tile_cycles)

    @property
    def most_per_cycle(self) -> float:
        """Multiply-adds, if products of tiles run beside all else."""
        return self.multiplies / max(self.cycles, self.tile_cycles)

    def text(self, each: float = 1.0) -> str:
        """A cell: one figure, or both bounds."""
        least, most = (each * rate for rate in (self.per_cycle, self.most_per_cycle))
        return f"{least:.0f}–{most:.0f}" if self.tile_cycles else f"{least:.1f}"


# -- kernels ---------------------------------------------------------------------------------------


def matmul(scheme: str, rows: int) -> Graph:
    """x [rows, 1024] · w [1024, 1024], the weight quantised, or both f32 or bf16."""
    g = Graph("matmul")
    if scheme in ("f32", "bf16"):
        x = g.input("x", Shape((rows, 1024), scheme))
        g.set_outputs(g.matmul(x, g.param("w", Shape((1024, 1024), scheme))))
        return g
    x = g.input("x", Shape((rows, 1024)))
    quant = QuantScheme.parse(scheme)
    w = g.param("w", Shape((1024, quant.row_bytes(1024)), "u8"))
    g.set_outputs(g.dequant_matmul(x, w, scheme=quant))
    return g


def attention(queries: int) -> Graph:
    """The attention of Qwen3-0.6B over 1024 positions of an f16 cache."""
    g = Graph("attention")
    q = g.input("q", Shape((1, queries, 16, 128)))
    k, v = (g.input(name, Shape((1, 1024, 8, 128), "f16")) for name in "kv")
    g.set_outputs(
        g.attention(
            q, k, v, num_heads=16, num_kv_heads=8, head_dim=128, kv_layout="bshd",
            mask_kind="causal",
        )
    )  # fmt: skip
    return g


class Case(NamedTuple):
    """A graph, the functions of its kernels that count, and the bytes of a weight where each is
    read once."""

    graph: Graph
    only: str = ".*"
    weight: float = 0.0


_ONE = "tile1|kernel"  # the functions for a single row
CASES = {
    "Q8_0, 1 row": Case(matmul("Q8_0", 1), _ONE, 34 / 32),
    "Q4_K, 1 row": Case(matmul("Q4_K", 1), _ONE, 144 / 256),
    "Q8_0, 128 rows": Case(matmul("Q8_0", 128)),
    "Q4_K, 128 rows": Case(matmul("Q4_K", 128)),
    "f32, 128 rows": Case(matmul("f32", 128)),
    "bf16, 128 rows": Case(matmul("bf16", 128)),
    "attention, 1 query": Case(attention(1)),
    "attention, 128 queries": Case(attention(128)),
}


def kernels(graph: Graph, target: Target) -> list[KernelSpec]:
    """The kernels of a graph on a target."""
    backend = CpuBackend(target)
    result = run_pipeline(graph, has_native=backend.has_native, lower=backend.rewrite_template)
    bound = backend.rewrite_variant(bind_graph(result.graph, DimBinding()))
    lir = plan(bound, prepare=result.prepare, scratch=backend.scratch)
    launches = lower_graph(Context(lir, target, 2))
    return [launch.spec for launch in launches if launch.spec is not None]


# -- loops in assembly -----------------------------------------------------------------------------

Lines = list[str]


def functions(assembly: str) -> dict[str, Lines]:
    """Instructions and labels of each function."""
    found: dict[str, Lines] = {}
    current: Lines | None = None
    for raw in assembly.splitlines():
        line = re.sub(r"\s*(#|//|;)\s.*$", "", raw).strip()
        if match := re.fullmatch(r"([\w.$]+):", line):
            if not match[1].startswith(".L"):
                current = found.setdefault(match[1], [])
            elif current is not None:
                current.append(line)
        elif current is not None and line and not line.startswith("."):
            current.append(line)
    return found


def loops(lines: Lines) -> list[tuple[int, int]]:
    """(label, back branch) of every loop, as positions."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    found: dict[int, int] = {}
    for at, line in enumerate(lines):
        target = line.split()[-1]
        if re.match(r"(j|b\.?|cbn?z|tbn?z)", line) and labels.get(target, at + 1) < at:
            found[labels[target]] = at
    return sorted(found.items())


def trips(lines: Lines, loop: tuple[int, int]) -> int | None:
    """How often a loop that counts from 0 to a constant runs; None where that is not known."""
    body = lines[loop[0] : loop[1]]
    compare = next((line for line in reversed(body) if re.match(_SETS_FLAGS, line)), "")
    match = re.match(r"cmp[lq]?\s+\$(\d+), (%\w+)|cmp\s+(\w+), #(\d+)", compare)
    if match is None:
        return None
    end, register = (match[1], match[2]) if match[1] else (match[4], match[3])
    counts = rf"add[lq]?\s+\$(\d+), {register}$|add\s+{register}, {register}, #(\d+)$"
    steps = [m for m in (re.match(f"{counts}|inc[lq]\\s+{register}$", line) for line in body) if m]
    if len(steps) != 1:
        return None
    count = int(end) // int(steps[0][1] or steps[0][2] or 1)
    return count if 0 < count <= _MOST_TRIPS else None


def unrolled(lines: Lines, loop: tuple[int, int]) -> Lines:
    """An iteration of a loop with the loops inside it written out; no labels, no branches."""
    inside = [i for i in loops(lines) if loop[0] < i[0] and i[1] < loop[1]]
    out: Lines = []
    at = loop[0]
    while at <= loop[1]:
        inner = next((i for i in inside if i[0] == at), None)
        if inner is not None:
            out += unrolled(lines, inner) * (trips(lines, inner) or 1)
            at = inner[1]
        elif not lines[at].endswith(":") and not re.match(r"(j|b|cbn?z|tbn?z|ret)", lines[at]):
            out.append(lines[at])
        at += 1
        if len(out) > _MOST_INSTRUCTIONS:
            raise SystemExit("mca: a loop of too many instructions")
    return out


def multiplies(lines: Lines) -> int:
    """Multiply-adds of some instructions."""
    for pattern, each in _MULTIPLIES:
        found = [line for line in lines if re.match(rf"(\{{vex\}}\s*)?({pattern})", line)]
        if found:
            return sum(each * _width(line) for line in found)
    return 0


def _width(line: str) -> int:
    """Registers of 128 bits in the vector that an instruction writes."""
    return 4 if "%zmm" in line else 2 if "%ymm" in line else 1


def tile_loop(assembly: str, only: str) -> Lines:
    """An iteration of the loop with the most multiply-adds in tiles, of functions whose name
    matches `only`; none without tiles."""
    found = []
    for name, lines in functions(assembly).items():
        every = loops(lines) if re.fullmatch(only, name) else []
        for loop in every:
            body = lines[loop[0] : loop[1]]
            inside = [i for i in every if loop[0] < i[0] and i[1] < loop[1]]
            constant = all(trips(lines, i) is not None for i in inside)
            if constant and _tile_products(body):
                found.append(unrolled(lines, loop))
    return max(found, key=multiplies, default=[])


def _tile_products(lines: Lines) -> int:
    return sum(line.startswith("tdp") for line in lines)


def by_rows(lines: Lines) -> Lines:
    """Moves of tiles as moves of their rows; products are left out."""
    out: Lines = []
    for line in lines:
        if match := re.match(r"tileloadd\s+(.*), %tmm\d", line):
            out += [f"vmovups {match[1]}, %zmm31"] * TILE_ROWS
        elif match := re.match(r"tilestored\s+%tmm\d, (.*)", line):
            out += [f"vmovups %zmm31, {match[1]}"] * TILE_ROWS
        elif not re.match(r"tilezero|tdp", line):
            out.append(line)
    return out


def hot_loop(assembly: str, only: str) -> Lines:
    """An iteration of the loop with the most multiply-adds per instruction, of functions whose name
    matches `only`, and of the loops around it that run a constant number of times."""
    best, chosen = 0.0, Lines()
    for name, lines in functions(assembly).items():
        found = loops(lines)
        for loop in found:
            density = multiplies(lines[loop[0] : loop[1]]) / (loop[1] - loop[0])
            is_inner = not any(loop[0] < o[0] and o[1] < loop[1] for o in found)
            if re.fullmatch(only, name) and is_inner and density > best:
                best, chosen = density, _with_constant_loops(lines, found, loop)
    return chosen


def _with_constant_loops(
    lines: Lines, found: list[tuple[int, int]], loop: tuple[int, int]
) -> Lines:
    while trips(lines, loop) is not None:
        around = [o for o in found if o[0] < loop[0] and loop[1] < o[1]]
        if not around:
            break
        loop = max(around)
    return unrolled(lines, loop)


# -- the estimate ----------------------------------------------------------------------------------


def program() -> str:
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            return found
    raise SystemExit("mca: there is no llvm-mca here\nhint: apt-get install llvm")


def estimate(lines: Lines, target: Target, cpu: str) -> Estimate:
    """What LLVM's model of the CPU says about a loop."""
    present = ",".join(f for f in target.features if f[0] == "+" and "reserve" not in f)
    command = [program(), f"-mtriple={target.triple}", f"-mcpu={cpu}", f"-mattr={present}"]
    done = subprocess.run(
        [*command, f"-iterations={_ITERATIONS}", "-instruction-info=0", "-resource-pressure=0"],
        input="\n".join(by_rows(lines)) + "\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    cycles = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or cycles is None:
        raise SystemExit(f"mca: {cpu}: {done.stderr[:2000]}")
    each = int(cycles[1]) / _ITERATIONS
    return Estimate(len(lines), multiplies(lines), each, _TILE_CYCLES * _tile_products(lines))


def target_of(name: str) -> Target:
    if name != WITHOUT_TILES:
        return Target.named(name)
    target = Target.named("sapphirerapids")
    return replace(target, features=tuple(f for f in target.features if "amx" not in f))


def hottest(case: Case, name: str) -> Estimate:
    """The densest loop of a graph's kernels."""
    target = target_of(name)
    code = [unit_of(spec, target).assembly() for spec in kernels(case.graph, target)]
    hot = (tile_loop(text, case.only) or hot_loop(text, case.only) for text in code)
    chosen = max(hot, key=multiplies)
    return estimate(chosen, target, _CPUS.get(name, target.cpu))


def main(argv: list[str]) -> int:
    parser = arguments("mca", __doc__ or "")
    parser.add_argument("--cpu", action="append", choices=TARGETS, help="default: all")
    options = parser.parse_args(argv)
    chosen = options.cpu or TARGETS
    figures: dict[str, dict[str, object]] = {}
    print(f"| multiply-adds per cycle | {' | '.join(chosen)} |")
    print("|---|" + "---|" * len(chosen))
    for label, case in CASES.items():
        each = {name: hottest(case, name) for name in chosen}
        cells = [e.text() for e in each.values()]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
        if case.weight:
            cells = [e.text(case.weight) for e in each.values()]
            print(f"| … bytes of weights | {' | '.join(cells)} |", flush=True)
        figures[label] = {
            n: [e.instructions, e.multiplies, e.cycles, e.tile_cycles] for n, e in each.items()
        }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0
