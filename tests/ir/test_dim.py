"""Dimensions: one normal form, whatever way an expression was built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import BindingError, OptionError, ShapeError
from rlx.ir.dim import as_dim, evaluate, parse_dim, same, substitute, sym, upper_bound

NAMES = ["batch", "seq", "past_seq", "frames"]
sizes = st.fixed_dictionaries({n: st.integers(0, 50) for n in NAMES})


def expressions() -> st.SearchStrategy[str]:
    leaf = st.sampled_from(NAMES) | st.integers(0, 9).map(str)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
            st.tuples(inner, inner).map(lambda p: f"({p[0]} * {p[1]})"),
            st.tuples(inner, inner).map(lambda p: f"({p[0]} - {p[1]})"),
            st.tuples(inner, st.integers(1, 7)).map(lambda p: f"({p[0]} // {p[1]})"),
        ),
        max_leaves=6,
    )


@given(expressions(), sizes)
def test_an_expression_means_what_python_says(text: str, given_sizes: dict[str, int]) -> None:
    # Python's own arithmetic on the same text is the independent answer
    assert evaluate(parse_dim(text), given_sizes) == eval(text, dict(given_sizes))


@given(expressions())
def test_printing_and_parsing_give_the_same_dimension(text: str) -> None:
    dim = parse_dim(text)
    assert as_dim(str(dim)) == dim
    assert hash(as_dim(str(dim))) == hash(dim)


@given(expressions(), sizes, st.sampled_from(NAMES))
def test_binding_in_two_steps_is_binding_at_once(
    text: str, given_sizes: dict[str, int], first: str
) -> None:
    dim = parse_dim(text)
    step = substitute(dim, {first: given_sizes[first]})
    assert evaluate(step, given_sizes) == evaluate(dim, given_sizes)


@given(expressions(), sizes, sizes)
def test_an_upper_bound_is_never_exceeded(
    text: str, bounds: dict[str, int], values: dict[str, int]
) -> None:
    within = {n: min(values[n], bounds[n]) for n in NAMES}
    dim = parse_dim(text)
    if "-" not in str(dim):  # products of differences may be bounded from neither side
        assert evaluate(dim, within) <= upper_bound(dim, bounds)


def test_order_of_building_does_not_matter() -> None:
    b, s = sym.BATCH, sym.SEQ
    assert b * s + 1 == 1 + s * b
    assert (b + s) * 2 == 2 * b + s + s
    assert s - s == 0
    assert isinstance(s - s + 3, int)


def test_rows_is_the_product_of_its_factors() -> None:
    assert same(sym.ROWS, sym.BATCH * sym.SEQ)
    assert substitute(sym.ROWS, {"batch": 2, "seq": 128}) == 256
    assert substitute(sym.ROWS, {"batch": 2}) == 2 * sym.SEQ
    assert not same(sym.ROWS, sym.BATCH)


def test_exact_quotients_leave_the_division() -> None:
    assert (sym.SEQ * 4 + 8) // 4 == sym.SEQ + 2
    assert str((sym.SEQ + 1) // 2) == "((seq + 1) // 2)"


@pytest.mark.parametrize("text", ["", "seq +", "(seq", "seq ** 2", "1.5", "seq batch", "a-", "//2"])
def test_text_that_is_no_dimension(text: str) -> None:
    with pytest.raises(ShapeError):
        parse_dim(text)


@pytest.mark.parametrize("value", [None, 1.5, True, object(), [1]])
def test_values_that_are_no_dimension(value: object) -> None:
    with pytest.raises(ShapeError, match="not a dimension"):
        as_dim(value)


def test_names_are_identifiers() -> None:
    with pytest.raises(OptionError, match="symbol name"):
        sym("two words")


def test_a_missing_size_is_named() -> None:
    with pytest.raises(BindingError, match="sizes for seq"):
        evaluate(sym.BATCH * sym.SEQ, {"batch": 2})
    with pytest.raises(BindingError, match="without a bound"):
        upper_bound(sym.SEQ, {"batch": 2})
