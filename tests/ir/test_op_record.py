"""Op records: how they are made, what is refused, and that the package registers them all."""

from __future__ import annotations

import copy
import pickle
import pkgutil
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

import rlx.ir.ops
from rlx.errors import OptionError
from rlx.ir.op import REGISTRY, Op, lookup, op
from rlx.ir.shape import Shape


def record(name: str, *args: Any, **attributes: Any) -> Any:
    return lookup(name)(*args, **attributes)


def test_attributes_by_position_by_name_and_by_default() -> None:
    made = record("narrow", 1, start="past_seq", length=2)
    assert made.attributes() == {"axis": 1, "start": Shape(["past_seq"]).dims[0], "length": 2}
    assert record("softmax").axis == -1
    changed = made.replace(length=4)
    assert changed.length == 4 and made.length == 2 and changed != made
    assert record("narrow", 1, "past_seq", 2) == made
    assert hash(record("narrow", 1, "past_seq", 2)) == hash(made)


@pytest.mark.parametrize(
    ("args", "attributes"),
    [((), {}), ((0, 0), {}), ((0, 0, 1, 1), {}), ((0, 0, 1), {"axis": 0}), ((0, 0, 1), {"end": 3})],
)
def test_wrong_attributes_say_which_there_are(
    args: tuple[int, ...], attributes: dict[str, int]
) -> None:
    with pytest.raises(TypeError, match="narrow takes axis, start, length"):
        record("narrow", *args, **attributes)


def test_records_are_frozen() -> None:
    made = record("softmax", axis=1)
    with pytest.raises(FrozenInstanceError, match="axis"):
        made.axis = 0
    with pytest.raises(FrozenInstanceError, match="axis"):
        del made.axis
    assert copy.copy(made) == made
    for each in (made, record("exp"), record("where"), record("cast", "bf16")):
        assert pickle.loads(pickle.dumps(each)) == each


def test_fields_of_a_record_are_inherited_and_class_variables_are_not_fields() -> None:
    @op("test_wider_softmax")
    class Wider(lookup("softmax")):  # type: ignore[misc]
        scale: float = 1.0

    try:
        made: Any = Wider(0, scale=2)
        assert made.attributes() == {"axis": 0, "scale": 2.0}
        assert "takes" not in lookup("sum").fields
        with pytest.raises(OptionError, match="exists"):
            op("test_wider_softmax")(type("Again", (Op,), {}))
    finally:
        del REGISTRY["test_wider_softmax"]


def test_importing_the_package_registers_every_file() -> None:
    files = {m.name for m in pkgutil.iter_modules(rlx.ir.ops.__path__)}
    assert {"elementwise", "binary", "reduce", "layout", "index", "source"} <= files
    loaded = (
        "import sys, rlx.ir.ops; print(*[m for m in sys.modules if m.startswith('rlx.ir.ops.')])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert {f"rlx.ir.ops.{f}" for f in files} == set(shown.stdout.split())


def test_every_op_says_what_it_does_and_computes_it() -> None:
    for name, cls in REGISTRY.items():
        assert cls.__doc__ and not cls.__doc__.startswith("Op("), name
        if not (cls.is_source or cls.is_block):
            assert cls.reference is not Op.reference, name
            assert cls.infer is not Op.infer, name
