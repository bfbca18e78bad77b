"""Builder methods of graphs, modules and values; the stub beside this file has their signatures.

Every registered op becomes a method of `OpMethods`, every block one of `BlockMethods`, and both
become methods of `ValueMethods` with the value as the first tensor. The methods are added when
an op is registered (see graph.py and hir.py), also for users' ops. Type checkers and editors read
`methods.pyi`, which `python tests/ir/make_methods.py` generates from the registry.
"""

from __future__ import annotations

from typing import Any


class OpMethods:
    """Gains a method for every MIR op."""

    __slots__ = ()


class BlockMethods(OpMethods):
    """Gains a method for every HIR block; a block hides the MIR op of the same name."""

    __slots__ = ()


class ValueMethods:
    """Gains a method for every op and block whose first argument is a tensor."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from rlx.ir.graph import UnknownMethod
        from rlx.ir.op import hint_for

        raise UnknownMethod("unknown method", got=name, hint=hint_for(name, dir(type(self))))
