"""Pages of the KV cache: reference counts and prefix caching.

A page holds the keys and values of `size` consecutive tokens of a sequence. Sequences with a common
prefix share pages: a full page is keyed by the page before it and its own tokens. A page without
holders keeps its contents until it is needed, the least recently used first.

A page is always released after those that follow it, so it is also evicted after them: no cached
page ever follows one with other contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Known = tuple[int, tuple[int, ...]]  # the page before, and the tokens of this one


class PageAllocator:
    """Allocates pages to sequences. Not safe for several threads."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, without holders, oldest first
        self._known: dict[Known, int] = {}
        self._names: dict[int, Known] = {}

    @property
    def available(self) -> int:
        """How many pages could be allocated now."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that nobody holds, kept for their contents."""
        return len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def begin(self, tokens: Sequence[int], most: int, kind: int = 0) -> list[int] | None:
        """Allocate pages for a sequence of at most `most` tokens with the prompt `tokens`; None if
        there are too few. The first ones may hold its prefix already: see `shared`."""
        shared = self.shared(tokens, kind)
        idle = sum(not self._holders[p] for p in shared)
        fresh = self.needed(most) - len(shared)
        if fresh > self.available - idle:
            return None
        for page in shared:
            self._hold(page)
        return shared + [self._take() for _ in range(fresh)]

    def shared(self, tokens: Sequence[int], kind: int = 0) -> list[int]:
        """Cached pages with a prefix of `tokens`, but not the last token, which has to run for its
        logits. Only sequences of one `kind` (adapter) share pages."""
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
        """Page `number` of a sequence now holds `tokens`: cache it for others.

        Where another page is cached for them already, this one and those after it are not."""
        before = pages[number - 1] if number else _none(kind)
        if number and before not in self._names:
            return
        name = (before, tuple(tokens))
        if name not in self._known:
            self._known[name] = pages[number]
            self._names[pages[number]] = name

    def end(self, pages: Sequence[int]) -> None:
        """Release the pages of a sequence."""
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
    """What stands for the page before the first one."""
    return -1 - kind
