"""Builder methods of graphs, modules and values; the stub beside this file has their signatures.

Every registered op becomes a method of `OpMethods`, every block one of `BlockMethods`, and both
become methods of `ValueMethods` with the value as the first tensor. The methods are added when
an op is registered (see graph.py and hir.py), also for users' ops. Type checkers and editors read
`methods.pyi`, which `python tests/ir/make_methods.py` generates from the registry.
"""

from __future__ import annotations


class OpMethods:
    """Gains a method for every MIR op."""

    __slots__ = ()


class BlockMethods(OpMethods):
    """Gains a method for every HIR block; a block hides the MIR op of the same name."""

    __slots__ = ()


class ValueMethods:
    """Gains a method for every op and block whose first argument is a tensor."""

    __slots__ = ()
