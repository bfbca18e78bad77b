"""Linking and loading relocatable ELF objects, in plain Python: cached code needs no LLVM.

Only what LLVM emits for our kernels is understood (x86-64 and AArch64, position independent, small
code model), on every system: Windows and macOS get ELF objects too. Anything else, and anything
damaged, is a `CodegenError`.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import field

from rlx.errors import CodegenError
from rlx.llvm.code_memory import ALLOWED, PAGE, code_memory
from rlx.llvm.target import Target
from rlx.support.records import dataclass

Patch = Callable[[bytearray, int, int, int], None]
"""(image, position in it, value S + A, address of the position)"""


@dataclass(frozen=True)
class Machine:
    """One architecture: its relocation types, and the code of a far-jump stub."""

    arch: str
    patches: dict[int, Patch]
    calls: frozenset[int]
    got: frozenset[int]
    stub_size: int
    stub: Callable[[int], bytes]

    def apply(
        self, image: bytearray, at: int, kind: int, symbol: int, addend: int, place: int
    ) -> None:
        """Raises KeyError for an unknown type, struct.error for a value out of reach."""
        self.patches[kind](image, at, symbol + addend, place)


def _absolute64(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<Q", image, at, value & (1 << 64) - 1)


def _relative64(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<q", image, at, value - place)


def _relative32(image: bytearray, at: int, value: int, place: int) -> None:
    struct.pack_into("<i", image, at, value - place)


def _x86_stub(address: int) -> bytes:
    return b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", address) + b"\xcc\xcc"


def _field(shift: int, bits: int, scale: int) -> Patch:
    """A signed, PC-relative instruction field."""

    def patch(image: bytearray, at: int, value: int, place: int) -> None:
        distance = value - place
        limit = 1 << bits - 1 + scale
        if distance % (1 << scale) or not -limit <= distance < limit:
            raise struct.error("branch out of reach")
        _merge(image, at, shift, bits, distance >> scale)

    return patch


def _low12(scale: int) -> Patch:
    """The low 12 bits of an address, as an instruction that accesses 2^scale bytes counts them."""

    def patch(image: bytearray, at: int, value: int, place: int) -> None:
        low = value & 0xFFF
        if low % (1 << scale):
            raise struct.error("address not aligned for the access")
        _merge(image, at, 10, 12, low >> scale)

    return patch


def _page(image: bytearray, at: int, value: int, place: int) -> None:
    _adr(image, at, (value >> 12) - (place >> 12))


def _near(image: bytearray, at: int, value: int, place: int) -> None:
    _adr(image, at, value - place)


def _adr(image: bytearray, at: int, distance: int) -> None:
    if not -(1 << 20) <= distance < 1 << 20:
        raise struct.error("address out of reach")
    _merge(image, at, 29, 2, distance)
    _merge(image, at, 5, 19, distance >> 2)


def _merge(image: bytearray, at: int, shift: int, bits: int, value: int) -> None:
    """Replace a bit field of the 32-bit instruction."""
    mask = (1 << bits) - 1
    (word,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, word & ~(mask << shift) | (value & mask) << shift)


def _arm_stub(address: int) -> bytes:
    return struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)  # ldr x16, #8; br x16


_X86_64 = Machine(
    "x86_64",
    {
        1: _absolute64,
        2: _relative32,
        4: _relative32,  # PLT32
        9: _relative32,  # GOTPCREL
        24: _relative64,
        41: _relative32,  # GOTPCRELX
        42: _relative32,  # REX_GOTPCRELX
    },
    calls=frozenset({2, 4}),
    got=frozenset({9, 41, 42}),
    stub_size=16,
    stub=_x86_stub,
)

_AARCH64 = Machine(
    "aarch64",
    {
        257: _absolute64,
        260: _relative64,
        261: _relative32,
        274: _near,
        275: _page,
        277: _low12(0),
        278: _low12(0),
        279: _field(5, 14, 2),  # TSTBR14
        280: _field(5, 19, 2),  # CONDBR19
        282: _field(0, 26, 2),  # JUMP26
        283: _field(0, 26, 2),  # CALL26
        284: _low12(1),
        285: _low12(2),
        286: _low12(3),
        299: _low12(4),
        311: _page,  # of the GOT slot
        312: _low12(3),
    },
    calls=frozenset({282, 283}),
    got=frozenset({311, 312}),
    stub_size=16,
    stub=_arm_stub,
)

MACHINES = {62: _X86_64, 183: _AARCH64}


MAX_IMAGE = 1 << 28

_WRITE, _ALLOC, _EXEC = 1, 2, 4
_SYMTAB, _RELA, _NOBITS, _REL, _INIT_ARRAY = 2, 4, 8, 9, 14
_UNDEFINED, _ABSOLUTE = 0, 0xFFF1


@dataclass(frozen=True)
class Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int
    value: int
    local: bool


@dataclass
class Layout:
    """Offsets of sections in the image; `text` and `readonly` are the ends of those segments."""

    starts: dict[int, int] = field(default_factory=dict)
    text: int = 0
    readonly: int = 0
    size: int = 0


class ObjectFile:
    """A parsed relocatable object. Parsing checks every offset before it is used."""

    def __init__(self, data: bytes, name: str = "object") -> None:
        self.data, self.name = data, name
        try:
            self._parse()
        except struct.error as error:
            raise self._damaged("the file ends too early") from error
        except UnicodeDecodeError as error:
            raise self._damaged("a symbol name is not text") from error

    def _damaged(self, what: str, got: object = None) -> CodegenError:
        return CodegenError(
            f"not a usable object: {what}",
            where=self.name,
            got=got,
            hint="delete the cached file; it is made again when needed",
        )

    def _parse(self) -> None:
        head = self.data[:20]
        if len(head) < 20 or head[:6] != b"\x7fELF\x02\x01" or head[16:18] != b"\x01\x00":
            raise self._damaged("no 64-bit little-endian relocatable ELF header")
        (number,) = struct.unpack_from("<H", head, 18)
        if number not in MACHINES:
            raise self._damaged("unknown machine", number)
        self.machine: Machine = MACHINES[number]
        (table,) = struct.unpack_from("<Q", self.data, 0x28)
        entry, count = struct.unpack_from("<HH", self.data, 0x3A)
        if entry != 64 or table + 64 * count > len(self.data):
            raise self._damaged("section table out of range")
        self.sections = [self._section(table + 64 * i) for i in range(count)]
        self.symbols = self._symbols()

    def _section(self, at: int) -> Section:
        _, kind, flags, _, offset, size, link, info, align, _ = struct.unpack_from(
            "<IIQQQQIIQQ", self.data, at
        )
        if kind != _NOBITS and kind != 0 and offset + size > len(self.data):
            raise self._damaged("section out of range", (offset, size))
        if size > MAX_IMAGE or align > 4096 or align & (align - 1):
            raise self._damaged("unreasonable section", (size, align))
        if flags & _ALLOC and kind >= _INIT_ARRAY and kind <= 16:
            raise self._damaged("code that wants to run at load time")
        return Section(kind, flags, offset, size, link, info, max(align, 1))

    def _symbols(self) -> list[Symbol]:
        tables = [s for s in self.sections if s.kind == _SYMTAB]
        if len(tables) != 1 or tables[0].link >= len(self.sections):
            raise self._damaged("no single symbol table")
        strings = self.sections[tables[0].link]
        text = self.data[strings.offset : strings.offset + strings.size]
        symbols = []
        for at in range(tables[0].offset, tables[0].offset + tables[0].size - 23, 24):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", self.data, at)
            end = text.find(b"\0", name)
            if name > len(text) or end < 0:
                raise self._damaged("symbol name out of range", name)
            if section < len(self.sections) and value > self.sections[section].size:
                raise self._damaged("symbol outside its section", value)
            symbols.append(Symbol(text[name:end].decode(), section, value, info >> 4 == 0))
        return symbols

    def layout(self) -> Layout:
        """Code first, then constants, then data, each beginning on a page of its own."""
        result = Layout()
        at = 0
        for part in (_EXEC, 0, _WRITE):
            for index, section in enumerate(self.sections):
                loaded = section.flags & _ALLOC and section.size
                if loaded and _part(section.flags) == part:
                    at = -(-at // section.align) * section.align
                    result.starts[index] = at
                    at += section.size
            if part == _EXEC:
                at += self.machine.stub_size * self._external_count()
                result.text = at = -(-at // PAGE) * PAGE
            elif part == 0:
                at = -(-at // 8) * 8 + 8 * len(self.symbols)
                result.readonly = at = -(-at // PAGE) * PAGE
        result.size = -(-at // PAGE) * PAGE or PAGE
        if result.size > MAX_IMAGE:
            raise self._damaged("too large", result.size)
        return result

    def _external_count(self) -> int:
        return sum(1 for s in self.symbols if s.section == _UNDEFINED and s.name)

    def externals(self) -> list[str]:
        """Symbols that the object needs from elsewhere."""
        used: set[int] = set()
        for section in self.sections:
            if section.kind == _RELA and self._target(section) is not None:
                used.update(symbol for _, _, symbol, _ in self._relocations(section))
        return sorted({self.symbols[i].name for i in used if self.symbols[i].section == _UNDEFINED})

    def _target(self, section: Section) -> Section | None:
        """The loaded section that relocations apply to."""
        if section.info >= len(self.sections):
            raise self._damaged("relocations of no section", section.info)
        target = self.sections[section.info]
        return target if target.flags & _ALLOC and target.size else None

    def _relocations(self, section: Section) -> list[tuple[int, int, int, int]]:
        found = []
        for at in range(section.offset, section.offset + section.size - 23, 24):
            offset, info, addend = struct.unpack_from("<QQq", self.data, at)
            symbol, kind = info >> 32, info & 0xFFFFFFFF
            if symbol >= len(self.symbols) or offset + 4 > self.sections[section.info].size:
                raise self._damaged("relocation out of range", (offset, symbol))
            found.append((offset, kind, symbol, addend))
        return found

    def link(self, base: int, resolve: Callable[[str], int]) -> tuple[bytearray, Mapping[str, int]]:
        """The image relocated to address `base`, and the addresses of its global symbols."""
        layout = self.layout()
        image = bytearray(layout.size)
        for index, start in layout.starts.items():
            section = self.sections[index]
            if section.kind != _NOBITS:
                piece = self.data[section.offset : section.offset + section.size]
                image[start : start + section.size] = piece
        linker = _Linker(self, layout, image, base, resolve)
        for section in self.sections:
            if section.kind == _REL and section.flags & _ALLOC:
                raise self._damaged("relocations without addends")
            if section.kind == _RELA and section.info in layout.starts:
                for offset, kind, symbol, addend in self._relocations(section):
                    linker.apply(layout.starts[section.info] + offset, kind, symbol, addend)
        exported = {
            s.name: base + layout.starts[s.section] + s.value
            for s in self.symbols
            if s.name and not s.local and s.section in layout.starts
        }
        return image, exported


def _part(flags: int) -> int:
    return _EXEC if flags & _EXEC else flags & _WRITE


class _Linker:
    """Applies relocations; makes a stub per external function and a slot per GOT entry."""

    def __init__(
        self,
        obj: ObjectFile,
        layout: Layout,
        image: bytearray,
        base: int,
        resolve: Callable[[str], int],
    ) -> None:
        self.obj, self.layout, self.image, self.base = obj, layout, image, base
        self.resolve = resolve
        self.stubs: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def apply(self, at: int, kind: int, symbol: int, addend: int) -> None:
        machine = self.obj.machine
        if kind in machine.got:
            value = self._slot(symbol)
        elif kind in machine.calls and self.obj.symbols[symbol].section == _UNDEFINED:
            value = self._stub(symbol)
        else:
            value = self._address(symbol)
        try:
            machine.apply(self.image, at, kind, value, addend, self.base + at)
        except (struct.error, IndexError) as error:
            raise self._bad("relocation does not fit", kind, symbol) from error
        except KeyError as error:
            raise self._bad("unknown relocation", kind, symbol) from error

    def _bad(self, what: str, kind: int, symbol: int) -> CodegenError:
        name = self.obj.symbols[symbol].name
        return CodegenError(what, where=self.obj.name, got=f"type {kind} for {name or 'a section'}")

    def _address(self, symbol: int) -> int:
        found = self.obj.symbols[symbol]
        if found.section == _UNDEFINED:
            return self.resolve(found.name)
        if found.section == _ABSOLUTE:
            return found.value
        if found.section not in self.layout.starts:
            raise self._bad("symbol in a section that is not loaded", 0, symbol)
        return self.base + self.layout.starts[found.section] + found.value

    def _stub(self, symbol: int) -> int:
        """A stub: external functions may be out of the range of a direct call."""
        if symbol not in self.stubs:
            machine = self.obj.machine
            start = self.layout.text - machine.stub_size * (len(self.stubs) + 1)
            code = machine.stub(self._address(symbol))
            self.image[start : start + len(code)] = code
            self.stubs[symbol] = self.base + start
        return self.stubs[symbol]

    def _slot(self, symbol: int) -> int:
        if symbol not in self.slots:
            start = self.layout.readonly - 8 * (len(self.slots) + 1)
            struct.pack_into("<Q", self.image, start, self._address(symbol))
            self.slots[symbol] = self.base + start
        return self.slots[symbol]


class Image:
    """One linked object; its code is mapped while the image lives."""

    def __init__(self, data: bytes, name: str = "object") -> None:
        obj = ObjectFile(data, name)
        if obj.machine.arch != Target.host().arch:
            raise CodegenError(
                "object is for another machine",
                where=name,
                got=obj.machine.arch,
                expected=Target.host().arch,
            )
        for symbol in obj.externals():
            _resolve(symbol, name)
        layout = obj.layout()
        self._size, self._base = layout.size, 0
        self._memory = memory = code_memory()
        self._base = memory.map(layout.size)
        content, self.symbols = obj.link(self._base, lambda symbol: _resolve(symbol, name))
        memory.write(self._base, bytes(content))
        memory.seal(self._base, layout.text, layout.readonly, layout.size)

    def address(self, name: str) -> int:
        """The address of a function."""
        found = self.symbols.get(name)
        if found is None:
            raise CodegenError(
                "no such function", where="image", got=name, expected=sorted(self.symbols)
            )
        return found

    def __del__(self) -> None:
        # While the interpreter ends, a daemon thread may still be inside: leave the pages. Globals
        # of this module may be gone by then.
        if getattr(self, "_base", 0) and sys is not None and not sys.is_finalizing():
            self._memory.free(self._base, self._size)


def _resolve(symbol: str, name: str) -> int:
    if symbol not in ALLOWED:
        raise CodegenError(
            "code calls a function that does not exist",
            where=name,
            got=symbol,
            expected="one of " + ", ".join(sorted(ALLOWED)),
            hint="an operation that this target lacks became a library call; emit it otherwise",
        )
    address = code_memory().address(symbol)
    if not address:
        raise CodegenError("this system has no such function", where=name, got=symbol)
    return address
