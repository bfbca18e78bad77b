"""The decode loop: repeated runs of an executable, each taking its inputs from the last outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from rlx.backends.buffer import Buffer, Mirror
from rlx.errors import OptionError
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.base import Executable


@dataclass(frozen=True)
class LoopSpec:
    """The loop-carried values of a decode loop. All other inputs stay the same."""

    carried: Mapping[str, str]  # input → the output of the previous run that it takes
    emitted: str  # the output, one i32, that the loop collects: the token
    counter: str  # the dynamic dimension that grows by one in each run: the position


class DecodeLoop:
    """Runs on arena slots; the caller has written the inputs of the first run there.

    This one launches every run from the host. A device may do better: see `Executable.decode_loop`.
    """

    def __init__(
        self,
        executable: Executable,
        spec: LoopSpec,
        run_once: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        """`run_once` replaces the executable's run, to record or check it."""
        self.executable, self.spec = executable, spec
        self._run_once = run_once or self._run
        manifest = executable.manifest
        self.carried: list[tuple[Buffer, Buffer]] = []  # target, source
        for name, output in spec.carried.items():
            target, source = (executable.slot(manifest.find(n)) for n in (name, output))
            if (source.nbytes, source.dtype) != (target.nbytes, target.dtype):
                raise OptionError(
                    "a carried output does not match its input", where=name,
                    got=f"{list(source.shape)} {source.dtype}",
                    expected=f"{list(target.shape)} {target.dtype}",
                )  # fmt: skip
            self.carried.append((target, source))
        self.emitted = executable.slot(manifest.find(spec.emitted))
        if (self.emitted.nbytes, self.emitted.dtype) != (4, "int32"):
            raise OptionError("not one i32", where=spec.emitted, got=self.emitted.dtype)
        self._token = Mirror(self.emitted)

    def run(self, sizes: Mapping[str, int], count: int, stop: Collection[int]) -> list[int]:
        """Run up to `count` times, from these sizes on, until a run emits a value in `stop`.
        Returns the emitted values."""
        found: list[int] = []
        while len(found) < count:
            position = sizes[self.spec.counter] + len(found)
            self._run_once({**sizes, self.spec.counter: position})
            for target, source in self.carried:
                target.allocator.copy(target, source)
            found.append(int(self._token.pull().reshape(-1)[0]))
            if found[-1] in stop:
                break
        return found

    def _run(self, sizes: Mapping[str, int]) -> None:
        manifest = self.executable.manifest
        inputs, outputs = [None] * len(manifest.inputs), [None] * len(manifest.outputs)
        self.executable.run(inputs, outputs, sizes)
