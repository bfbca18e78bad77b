"""Pages of the KV cache: reference counts and prefix caching.

A page holds the keys and values of `size` consecutive tokens of a sequence. Sequences with a common
prefix share pages: a full page is keyed by the page before it and its own tokens. Those of a prompt
are shared from the moment it is admitted: one sequence fills such a page, others wait for it, and
one of them goes on where it leaves. A page without holders keeps its contents until it is needed,
the least recently used first.

A page is always released after those that follow it, so it is also evicted after them: no cached
page ever follows one with other contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Known = tuple[int, tuple[int, ...]]  # the page before, and the tokens of this one


class PageAllocator:
    """Allocates pages to sequences. Not safe for several threads."""

    def __init__(self, count: int, size: int, share: bool = True) -> None:
        """Without `share` every sequence has pages of its own."""
        self.count, self.size, self._share = count, size, share
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, without holders, oldest first
        self._known: dict[Known, int] = {}
        self._names: dict[int, Known] = {}
        self._unready: dict[int, object] = {}  # pages to be filled, and by whom; None: nobody yet

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

    def begin(
        self, tokens: Sequence[int], most: int, kind: int = 0, owner: object = None
    ) -> tuple[list[int], int] | None:
        """Allocate pages for a sequence of at most `most` tokens with the prompt `tokens`; None if
        there are too few. So many of the first ones hold its prefix, or will: see `claim`. The
        `owner` is to fill the other pages of the prompt."""
        shared = self.shared(tokens, kind)
        idle = sum(not self._holders[p] for p in shared)
        fresh = self.needed(most) - len(shared)
        if fresh > self.available - idle:
            return None
        for page in shared:
            self._hold(page)
        pages = shared + [self._take() for _ in range(fresh)]
        for number in range(len(shared), len(tokens) // self.size):
            part = tokens[number * self.size : (number + 1) * self.size]
            if not self._name(pages, number, part, kind):
                break
            self._unready[pages[number]] = owner
        return pages, len(shared)

    def is_ready(self, page: int) -> bool:
        """Whether a page holds its tokens."""
        return page not in self._unready

    def filler(self, page: int) -> object:
        """Who is to fill a page that is not ready; None if that one has left."""
        return self._unready[page]

    def claim(self, pages: Sequence[int], owner: object) -> None:
        """The owner is to fill those of these pages that are not ready and nobody's."""
        for page in pages:
            if page in self._unready and self._unready[page] is None:
                self._unready[page] = owner

    def shared(self, tokens: Sequence[int], kind: int = 0) -> list[int]:
        """Pages with a prefix of `tokens`, but not the last token, which has to run for its
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
        self._unready.pop(pages[number], None)
        self._name(pages, number, tokens, kind)

    def _name(self, pages: Sequence[int], number: int, tokens: Sequence[int], kind: int) -> bool:
        """Have a page found by its tokens, if those before are and no other one is."""
        before = pages[number - 1] if number else _none(kind)
        name = (before, tuple(tokens))
        if not self._share or (number and before not in self._names) or name in self._known:
            return False
        self._known[name] = pages[number]
        self._names[pages[number]] = name
        return True

    def end(self, pages: Sequence[int], owner: object = None) -> None:
        """Release the pages of a sequence; what it has not filled is left to others who hold it."""
        for page in reversed(pages):
            if page in self._unready and self._unready[page] is owner:
                self._unready[page] = None
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._unready.pop(page, self) is not self:
                self._forget(page)
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _hold(self, page: int) -> None:
        self._idle.pop(page, None)
        self._holders[page] += 1

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
        self._forget(page)
        self._holders[page] = 1
        return page

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is not None:
            del self._known[name]


def _none(kind: int) -> int:
    """What stands for the page before the first one."""
    return -1 - kind
