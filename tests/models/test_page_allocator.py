"""Pages of the KV cache: shared prefixes, counts, and nothing lost, whatever comes and goes."""

from __future__ import annotations

import random

import pytest

from rlx.models.batch.page_allocator import PageAllocator

SIZE = 4


def begin(pages: PageAllocator, tokens: list[int], most: int = 0) -> list[int]:
    found = pages.begin(tokens, most or len(tokens) + 1)
    assert found is not None
    return found[0]


def learn_all(pages: PageAllocator, held: list[int], tokens: list[int]) -> None:
    for number in range(len(tokens) // SIZE):
        pages.learn(held, number, tokens[number * SIZE : (number + 1) * SIZE])


def test_equal_prefixes_share_pages() -> None:
    pages = PageAllocator(8, SIZE)
    first = begin(pages, list(range(10)))
    learn_all(pages, first, list(range(10)))
    second = begin(pages, [*range(8), 70, 71])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert pages.held == 4


def test_the_last_token_is_never_taken_from_a_page() -> None:
    pages = PageAllocator(8, SIZE)
    tokens = list(range(8))
    held = begin(pages, tokens)
    learn_all(pages, held, tokens)
    assert pages.shared(tokens) == held[:1]
    assert pages.shared([*tokens, 8]) == held[:2]


def test_contents_survive_their_sequence_until_the_page_is_needed() -> None:
    pages = PageAllocator(4, SIZE)
    tokens = list(range(9))
    held = begin(pages, tokens)
    learn_all(pages, held, tokens)
    pages.end(held)
    assert pages.available == 4
    assert pages.shared(tokens) == held[:2]
    begin(pages, [50] * 9)  # two pages were free; one that was known goes, the later one first
    assert pages.shared(tokens) == held[:1]


def test_too_few_pages_give_nothing_and_take_nothing() -> None:
    pages = PageAllocator(3, SIZE)
    held = begin(pages, [1] * 8)
    assert pages.available == 0
    assert pages.begin([2] * 4, 5) is None
    pages.end(held)
    assert pages.begin([2] * 4, 13) is None
    assert pages.available == 3


def test_idle_pages_that_are_shared_do_not_count_twice() -> None:
    pages = PageAllocator(2, SIZE)
    tokens = list(range(5))
    held = begin(pages, tokens)
    learn_all(pages, held, tokens)
    pages.end(held)
    assert pages.begin(tokens, 9) is None  # three pages, though one of two is known
    assert pages.available == 2
    assert begin(pages, tokens, 8)[0] == held[0]


def test_pages_of_a_prompt_are_shared_before_they_are_filled() -> None:
    pages, tokens = PageAllocator(8, SIZE), list(range(10))
    first, none = pages.begin(tokens, 12, owner="a") or ([], -1)
    second, count = pages.begin([*range(8), 70, 71], 12, owner="b") or ([], -1)
    assert (none, count, second[:2]) == (0, 2, first[:2])
    assert not pages.is_ready(first[0]) and pages.filler(first[0]) == "a"
    pages.learn(first, 0, tokens[:SIZE])
    assert pages.is_ready(first[0]) and not pages.is_ready(first[1])
    pages.end(first, "a")  # before the second page was filled
    assert pages.filler(first[1]) is None
    pages.claim(second[:2], "b")
    pages.claim(second[:2], "c")
    assert pages.filler(second[1]) == "b"
    pages.end(second, "b")
    assert pages.shared(tokens) == first[:1]  # what was never filled is not found
    assert pages.available == 8


def test_without_sharing_every_sequence_has_its_own() -> None:
    pages, tokens = PageAllocator(8, SIZE, share=False), list(range(10))
    held = begin(pages, tokens)
    learn_all(pages, held, tokens)
    assert pages.shared(tokens) == []
    pages.end(held)
    assert pages.cached == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_page_found_for_tokens_always_contains_them(seed: int) -> None:
    """Contents are tracked beside the pool, as a cache would have them, through random use."""
    rng = random.Random(seed)
    pages = PageAllocator(12, SIZE)
    contents: dict[int, list[int]] = {}
    running: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        if running and rng.random() < 0.5:
            tokens, held = running.pop(rng.randrange(len(running)))
            pages.end(held)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        before = pages.shared(tokens)
        given = pages.begin(tokens, len(tokens) + rng.randrange(5))
        if given is None:
            continue
        found, count = given
        seen = found[:count]
        assert seen == before and count <= (len(tokens) - 1) // SIZE
        for number, page in enumerate(seen):
            assert contents[page] == tokens[: (number + 1) * SIZE]
        for number in range(len(seen), len(tokens) // SIZE):
            contents[found[number]] = tokens[: (number + 1) * SIZE]
            pages.learn(found, number, tokens[number * SIZE : (number + 1) * SIZE])
        running.append((tokens, found))
        assert len(set(found)) == len(found)
        assert pages.held == len({p for _, held in running for p in held})
    for _, held in running:
        pages.end(held)
    assert pages.available == 12
