"""Runs of an executable one after the other, each fed by the one before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from rlx.errors import OptionError
from rlx.ir.op import Array
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.base import Executable


@dataclass(frozen=True)
class Links:
    """How runs hang together. Inputs that are not fed are the same in every run."""

    feeds: Mapping[str, str]  # an input, and the output of the run before that it takes
    kept: str  # an i32 output: its value in every run is what a chain gives
    grows: str  # a live size, larger by one in each run


class Chain:
    """Works on what lies in the arena, where the caller has written the first run's inputs."""

    def __init__(
        self,
        executable: Executable,
        links: Links,
        once: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        """`once` does a run in place of the executable, to watch it."""
        self.executable, self.links = executable, links
        self._once = once or self._plainly
        manifest = executable.manifest
        self.moves: list[tuple[Array, Array]] = []  # to, from
        for name, output in links.feeds.items():
            place, source = (executable.slot(manifest.find(n)).reshape(-1) for n in (name, output))
            if (source.size, source.dtype) != (place.size, place.dtype):
                raise OptionError(
                    "an output that does not fit the input it feeds", where=name,
                    got=f"{source.size} of {source.dtype}",
                    expected=f"{place.size} of {place.dtype}",
                )  # fmt: skip
            self.moves.append((place, source))
        self.kept = executable.slot(manifest.find(links.kept)).reshape(-1)
        if (self.kept.size, self.kept.dtype) != (1, "int32"):
            raise OptionError("not one i32", where=links.kept, got=self.kept.dtype)

    def run(self, sizes: Mapping[str, int], count: int, ends: Collection[int]) -> list[int]:
        """Up to `count` runs, the first with these sizes, until one gives a value among `ends`;
        what each gave."""
        found: list[int] = []
        while len(found) < count:
            grown = sizes[self.links.grows] + len(found)
            self._once({**sizes, self.links.grows: grown})
            found.append(int(self.kept[0]))
            for place, source in self.moves:
                place[:] = source
            if found[-1] in ends:
                break
        return found

    def _plainly(self, sizes: Mapping[str, int]) -> None:
        manifest = self.executable.manifest
        given, results = [None] * len(manifest.inputs), [None] * len(manifest.outputs)
        self.executable.run(given, results, sizes)
