"""Records are what `dataclasses.dataclass` makes, each case asked of both."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field, replace
from typing import Any, ClassVar

import pytest

from rlx.support.records import dataclass

BOTH = pytest.mark.parametrize("make", [dataclass, dataclasses.dataclass], ids=["rlx", "library"])
Make = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """Two numbers."""

    x: int
    y: int = 2
    names: tuple[str, ...] = ()


def point(make: Make, **options: Any) -> Any:
    class P:
        x: int
        y: int = 2
        kept: list[int] = field(default_factory=list, compare=False, repr=False)
        COUNT: ClassVar[int] = 3

    return make(**options)(P)


@BOTH
@pytest.mark.parametrize("frozen", [False, True])
def test_fields_defaults_and_errors_of_arguments(make: Make, frozen: bool) -> None:
    made = point(make, frozen=frozen)
    a, b = made(1), made(y=5, x=4, kept=[1])
    assert (a.x, a.y, a.kept, b.x, b.y, b.kept) == (1, 2, [], 4, 5, [1])
    assert a.kept is not made(1).kept
    assert [f.name for f in dataclasses.fields(made)] == ["x", "y", "kept"]
    assert made.__match_args__ == ("x", "y", "kept") and made.COUNT == 3
    for _ in range(2):  # the first call of a class is not told otherwise than a later one
        fresh = point(make, frozen=frozen)
        for wrong in ((), (1, 2, [], 4)):
            with pytest.raises(TypeError, match=r"P.__init__\(\) (missing|takes)"):
                fresh(*wrong)
        with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
            fresh(1, z=2)
    assert repr(a).endswith("P(x=1, y=2)")
    assert replace(b, x=7).kept == [1] and dataclasses.asdict(b) == {"x": 4, "y": 5, "kept": [1]}


@BOTH
def test_equal_and_hashed_by_the_fields_that_count(make: Make) -> None:
    frozen, loose, apart = point(make, frozen=True), point(make), point(make, eq=False)
    assert frozen(1) == frozen(1, kept=[2]) != frozen(2)
    assert hash(frozen(1)) == hash(frozen(1, kept=[2])) and len({frozen(1), frozen(1)}) == 1
    assert loose(1) == loose(1) and loose.__hash__ is None
    assert apart(1) != apart(1) and isinstance(hash(apart(1)), int)
    assert frozen(1) != point(make, frozen=True)(1), "another class of the same name"


@BOTH
def test_frozen_ones_stay_and_those_under_them_may_add(make: Make) -> None:
    made = point(make, frozen=True)
    under = type("Under", (made,), {})
    for change in (lambda p: setattr(p, "x", 3), lambda p: delattr(p, "y")):
        for of in (made, under):
            with pytest.raises(FrozenInstanceError):
                change(of(1))
    with pytest.raises(FrozenInstanceError):
        made(1).other = 3
    more = under(1)
    more.other = 3
    assert more.other == 3
    del more.other
    assert not hasattr(more, "other")


@BOTH
def test_what_a_class_says_itself_counts(make: Make) -> None:
    class Own:
        x: int
        double: int = field(init=False)
        late: tuple[int, ...] = field(init=False, default_factory=tuple)
        _: dataclasses.KW_ONLY
        named: int = 0

        def __post_init__(self) -> None:
            object.__setattr__(self, "double", 2 * self.x)

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    Own.__annotations__["_"] = dataclasses.KW_ONLY
    made = make(frozen=True)(Own)
    assert made(4).double == 8 and made(4).late == () and made(1, named=3).named == 3
    assert made(1) == made(2) and repr(made(1)) == "own"
    assert hash(made(1)) != hash(made(2)), "the hash is of the fields all the same"
    with pytest.raises(TypeError):
        made(1, 2)


@BOTH
def test_a_record_of_a_record(make: Make) -> None:
    base = point(make, frozen=True)

    class Under(base):  # type: ignore[misc,valid-type]
        z: int = 9

    class Calls(base):  # type: ignore[misc,valid-type]
        def __init__(self, x: int) -> None:
            super().__init__(x, 20)

    under = make(frozen=True)(Under)
    assert under(1, 2, [3], 4).z == 4 and under(1) != base(1)
    assert (Calls(3).x, Calls(3).y) == (3, 20)


def test_copies_and_pickles() -> None:
    a = Point(1, names=("b",))
    assert copy.deepcopy(a) == a == pickle.loads(pickle.dumps(a))
    assert Point.__doc__ == "Two numbers." and repr(a) == "Point(x=1, y=2, names=('b',))"


def test_other_options_are_those_of_the_library() -> None:
    made = point(dataclass, slots=True, frozen=True)
    assert made.__slots__ == ("x", "y", "kept") and made(1) == made(1)
