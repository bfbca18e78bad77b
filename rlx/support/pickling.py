"""Objects that hold machine code, threads or mapped files: `pickle` and `copy` refuse them."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from rlx.errors import UnsupportedError

COMPILE_AGAIN = (
    "pickle the GraphModule and compile it in each process, or ship the file of rlx.compile_bundle"
)


class Unpicklable:
    """Raises when it is pickled or copied; `instead` says what to do then."""

    instead = "load the model in each process: what it keeps on disk is shared"

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise UnsupportedError(
            "cannot be pickled or copied", where=type(self).__name__,
            got="machine code, threads or mapped files", hint=self.instead,
        )  # fmt: skip
