"""Sizes for a program: `--variant decode:1`, `--bind seq=128`, `--bind 'past_seq<=4095'`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlx.errors import OptionError

if TYPE_CHECKING:
    from rlx.cli.programs import Subject
    from rlx.ir.binding import DimBinding, Size

_VARIANT = re.compile(r"(prefill|decode|encoder|inference)(?::(\d+)(?:x(\d+))?)?")
_BIND = re.compile(r"(\w+)\s*(=|<=)\s*(\d+)")


def parse_variant(text: str, context: int, chunk: int) -> dict[str, Size]:
    """`PHASE[:BATCH[xSEQ]]` as sizes of batch, seq and past_seq.

    Without SEQ a prefill takes up to `chunk` tokens at once and a decode one; the past is as long
    as the context allows. A prefill of SEQ tokens has none before it.
    """
    from rlx.ir.binding import UpTo

    phase, batch, seq = split_variant(text)
    past = UpTo(max(context - 1, 1))
    if phase == "decode":
        return {"batch": batch, "seq": seq or 1, "past_seq": past}
    if seq:
        return {"batch": batch, "seq": seq, "past_seq": 0}
    return {"batch": batch, "seq": UpTo(min(chunk, context)), "past_seq": past}


def split_variant(text: str) -> tuple[str, int, int]:
    """Phase, batch, and tokens or 0 where they are left out."""
    match = _VARIANT.fullmatch(text)
    if match is None or match[2] == "0" or match[3] == "0":
        raise OptionError(
            "not a variant", where="--variant", got=repr(text),
            expected="PHASE:BATCH or PHASE:BATCHxSEQ, such as decode:1 or prefill:1x128",
        )  # fmt: skip
    return match[1], int(match[2] or 1), int(match[3] or 0)


def parse_bindings(texts: Iterable[str]) -> dict[str, Size]:
    """`NAME=SIZE` and `NAME<=BOUND`, the latter live."""
    from rlx.ir.binding import UpTo

    found: dict[str, Size] = {}
    for text in texts:
        match = _BIND.fullmatch(text.strip())
        if match is None:
            raise OptionError(
                "not a size", where="--bind", got=repr(text), expected="NAME=SIZE or NAME<=BOUND"
            )
        found[match[1]] = int(match[3]) if match[2] == "=" else UpTo(int(match[3]))
    return found


def binding_for(subject: Subject, variant: str | None, bindings: Iterable[str]) -> DimBinding:
    """Sizes of the symbols that the program has."""
    from rlx.ir.binding import DimBinding
    from rlx.ir.dim import DERIVED
    from rlx.models.decoder_runner import CHUNK

    sizes: dict[str, Size] = {}
    asked_for = variant or subject.usual_variant
    if asked_for is not None:
        sizes = parse_variant(asked_for, subject.context or 4096, CHUNK)
    if subject.generates and sizes["batch"] != 1:
        raise OptionError(
            "the model runs one sequence at a time", where="--variant", got=variant,
            expected="a batch of 1",
        )  # fmt: skip
    graph = subject.module.as_hir() or subject.module.as_graph()
    assert graph is not None
    used = {f for s in graph.symbols() for f in (DERIVED[s].symbols if s in DERIVED else {s})}
    asked = parse_bindings(bindings)
    unknown = sorted(asked.keys() - used)
    if unknown:
        raise OptionError(
            "no such symbol", where="--bind", got=", ".join(unknown),
            expected=", ".join(sorted(used)) or "none: all sizes are fixed",
        )  # fmt: skip
    return DimBinding({s: size for s, size in (sizes | asked).items() if s in used})
