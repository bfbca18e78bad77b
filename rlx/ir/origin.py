"""Where a node came from: the user's source line, the block, and the passes that touched it."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Origin(NamedTuple):
    block: str = ""
    file: str = ""
    line: int = 0
    passes: tuple[str, ...] = ()

    def touched(self, pass_name: str) -> Origin:
        """The same origin, with one more pass in its history."""
        if self.passes and self.passes[-1] == pass_name:
            return self
        return self._replace(passes=(*self.passes, pass_name))

    def inside(self, block: str) -> Origin:
        """The same origin, `block` around it."""
        return self._replace(block=f"{block}.{self.block}" if self.block else block)

    def __str__(self) -> str:
        parts = []
        if self.block:
            parts.append(f"block {self.block}")
        if self.file:
            parts.append(f"{os.path.basename(self.file)}:{self.line}")
        if self.passes:
            parts.append(f"via {' > '.join(self.passes)}")
        return ", ".join(parts)


UNKNOWN = Origin()


_origins: dict[tuple[str, str, int], Origin] = {}


def caller(block: str, depth: int = 3) -> Origin:
    """The nearest frame outside the package: the line of the user's that built a node.

    The `depth` frames nearest to this one are known to be inside.
    """
    frame = sys._getframe(depth)
    while frame.f_code.co_filename.startswith(_PACKAGE):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    key = (block, frame.f_code.co_filename, frame.f_lineno)
    found = _origins.get(key)
    if found is None:
        found = _origins[key] = Origin(*key)
    return found
