"""Values that blocks hand each other while a kernel runs: the instructions of PTX for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.builder import (
    FIXED_LIMIT,
    FIXED_NAN,
    FIXED_SCALE,
    BlockFunction,
    Place,
)
from rlx.llvm.builder import Value, f32, i32

_TAG = 3  # the bits of a word that are its tag
_CLOCKS_OF_A_POLL = 512  # at least


class ExchangeFunction(BlockFunction):
    def _asm(
        self, text: str, results: Sequence[str], args: Sequence[Value], effect: bool = True
    ) -> list[Value]:
        raise NotImplementedError

    def hand_over(self, value: Value, address: Value, tag: Value) -> None:
        word = (value.bits(i32) & ~_TAG) | tag
        self._asm("st.relaxed.gpu.global.u32 [$0], $1;", [], [address, word])

    def look(self, places: Sequence[Place]) -> list[Value]:
        found = []
        for address, offset, width in places:
            names = ", ".join(f"${i}" for i in range(width))
            to, form = ("$0", "") if width == 1 else (f"{{{names}}}", f".v{width}")
            text = f"ld.relaxed.gpu.global{form}.u32 {to}, [${width}+{offset}];"
            found += self._asm(text, ["r"] * width, [address])
        return found

    def receive(self, places: Sequence[Place], tag: Value, seen: Sequence[Value]) -> list[Value]:
        words = self._poll(lambda: self.look(places), tag, _TAG, seen)
        return [word.bits(f32) for word in words]

    def _poll(
        self, look: Callable[[], list[Value]], tag: Value, mask: int, seen: Sequence[Value]
    ) -> list[Value]:
        """Look until all words end in the tag."""

        def wrong(words: Sequence[Value]) -> Value:
            found = self.i32(0)
            for word in words:
                found = found | (word.to(i32) ^ tag)
            return found & mask

        most = min(self.patience // _CLOCKS_OF_A_POLL or 1 << 30, (1 << 31) - 1)

        def again(_: Value, tries: Value, *__: Value) -> list[Value]:
            words = look()
            return [wrong(words), tries + 1, *words]

        found = self.while_(
            [wrong(seen), self.i32(0), *seen],
            lambda wrong, tries, *_: wrong.ne(0) & (tries < most),
            again,
        )
        for _ in self.when(found[0].ne(0)):
            self._asm("trap;", [], [])
        return found[2:]

    def add_fixed(self, value: Value, address: Value) -> None:
        scaled = value * FIXED_SCALE
        size = self.abs(scaled)
        scaled = self.select(size < FIXED_NAN * FIXED_SCALE, scaled, FIXED_NAN * FIXED_SCALE)
        text = (
            "{ .reg .s64 a; cvt.rni.s64.f32 a, $1; shl.b64 a, a, 8; add.s64 a, a, 1; "
            "red.relaxed.gpu.global.add.u64 [$0], a; }"
        )
        self._asm(text, [], [address, scaled])

    def look_at_sums(self, address: Value, offsets: Sequence[int]) -> list[Value]:
        return [
            self._asm(f"ld.relaxed.gpu.global.u64 $0, [$1+{o}];", ["l"], [address])[0]
            for o in offsets
        ]

    def receive_sums(
        self, address: Value, offsets: Sequence[int], count: Value, seen: Sequence[Value]
    ) -> list[Value]:
        words = self._poll(lambda: self.look_at_sums(address, offsets), count, 255, seen)
        made = []
        for word in words:
            text = "cvt.rn.f32.s64 $0, $1;"
            number = self._asm(text, ["f"], [word.ashr(8)], effect=False)[0] * (1 / FIXED_SCALE)
            fine = self.abs(number) < FIXED_LIMIT
            made.append(self.select(fine, number, float("nan")))
        return made
