"""Pages of the cache: who holds them, and which beginnings of sequences they already contain.

A page holds the keys and values of `size` consecutive tokens of a sequence. Several sequences may
hold one page, as long as they have begun with the same tokens: a full page is known by the page
before it and its own tokens. A page that nobody holds keeps what it contains until it is needed for
something else, the longest unused first.

A page always falls idle after those that follow it, so it is also taken after them: no known page
ever follows one with other contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Known = tuple[int, tuple[int, ...]]  # the page before, and the tokens of this one


class Pages:
    """Not safe for several threads."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, oldest first
        self._known: dict[Known, int] = {}
        self._names: dict[int, Known] = {}

    @property
    def available(self) -> int:
        """How many pages could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def begin(self, tokens: Sequence[int], most: int, kind: int = 0) -> list[int] | None:
        """Pages for a sequence of at most `most` tokens that begins with `tokens`; None if there
        are too few. The first ones may contain the beginning already: see `shared`."""
        shared = self.shared(tokens, kind)
        idle = sum(not self._holders[p] for p in shared)
        fresh = self.needed(most) - len(shared)
        if fresh > self.available - idle:
            return None
        for page in shared:
            self._hold(page)
        return shared + [self._take() for _ in range(fresh)]

    def shared(self, tokens: Sequence[int], kind: int = 0) -> list[int]:
        """Known pages that contain the beginning of `tokens`, but not their last one, which has to
        run because its logits are wanted. Only sequences of a kind share pages."""
        found: list[int] = []
        before = _none(kind)
        for start in range(0, len(tokens) - self.size, self.size):
            page = self._known.get((before, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def learn(
        self, pages: Sequence[int], number: int, tokens: Sequence[int], kind: int = 0
    ) -> None:
        """Page `number` of a sequence now holds `tokens`, and may serve others.

        Where another page is known for them already, this one and those after it stay unknown."""
        before = pages[number - 1] if number else _none(kind)
        if number and before not in self._names:
            return
        name = (before, tuple(tokens))
        if name not in self._known:
            self._known[name] = pages[number]
            self._names[pages[number]] = name

    def end(self, pages: Sequence[int]) -> None:
        """A sequence lets go of its pages."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self._holders[page] += 1

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
        name = self._names.pop(page, None)
        if name is not None:
            del self._known[name]
        self._holders[page] = 1
        return page


def _none(kind: int) -> int:
    """What stands for the page before the first one of a kind of sequences."""
    return -1 - kind
