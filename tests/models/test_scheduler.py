"""The policy of the engine without a model: order, shares, pages, deadlines, room for prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_generate import Letters

from rlx.errors import OptionError, QueueFullError
from rlx.models.batch.fair_queue import AGEING, OVERDUE, FairQueue
from rlx.models.batch.page_allocator import PageAllocator
from rlx.models.batch.request import Request, Terms
from rlx.models.batch.scheduler import Scheduler, share_room
from rlx.models.batch.step_timer import LEAST, StepTimer
from rlx.models.sampling import GenerationSettings

SIZE = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(
    prompt: int | list[int] = 3, output: int = 4, adapter: int = 0, **terms: Any
) -> Request:
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    settings = GenerationSettings(max_tokens=output, seed=1)
    return Request(tokens, settings, Letters(), 99, 4096, adapter, Terms(**terms))  # type: ignore


def order(queue: FairQueue, now: float, cost: int = 10) -> list[Request]:
    """All requests as they are served at one moment."""
    found = []
    while (first := queue.first(now)) is not None:
        queue.serve(first, now)
        queue.charge(first, cost)
        found.append(first)
    return found


def test_higher_priorities_go_first_and_equal_ones_in_turn() -> None:
    queue = FairQueue()
    given = [request(priority=p) for p in (0, 5, 0, -1, 5)]
    for at, one in enumerate(given):
        queue.add(one, at / 10)
    assert order(queue, 1.0) == [given[i] for i in (1, 4, 0, 2, 3)]
    assert len(queue) == 0 and queue.first(1.0) is None


def test_a_low_priority_is_served_in_the_end() -> None:
    queue, low = FairQueue(), request(priority=-2, user="low")
    queue.add(low, 0.0)
    served = []
    for step in range(100):  # another one comes every half second, and one is served
        now = step / 2
        queue.add(request(priority=0, user=f"user {step % 3}"), now)
        first = queue.first(now)
        assert first is not None
        queue.serve(first, now)
        queue.charge(first, 10)
        served.append(first)
    assert low in served
    assert 2 * AGEING <= served.index(low) / 2 <= 3 * AGEING


def test_a_flood_of_new_users_does_not_starve_one_who_had_much() -> None:
    queue, big = FairQueue(), request(user="big")
    queue.add(request(user="big"), 0.0)
    first = queue.first(0.0)
    assert first is not None
    queue.serve(first, 0.0)
    queue.charge(first, 10_000)
    queue.add(big, 0.0)
    for second in range(200):
        queue.add(request(user=str(second)), float(second))
        first = queue.first(float(second))
        assert first is not None
        queue.serve(first, float(second))
        if first is big:
            break
    assert first is big and second <= OVERDUE + 1


def test_users_get_equal_shares_whatever_they_queue() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.add(request(user="many"), number / 100)
    for number in range(4):
        queue.add(request(user="few"), 1 + number / 100)
    first = [one.terms.user for one in order(queue, 2.0)[:8]]
    assert first.count("few") == 4


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = FairQueue()
    for number in range(30):
        queue.add(request(user="long"), number / 100)
        queue.add(request(user="short"), number / 100)
    tokens = dict.fromkeys(("long", "short"), 0)
    for _ in range(33):
        first = queue.first(1.0)
        assert first is not None and first.terms.user is not None
        cost = 1000 if first.terms.user == "long" else 100
        queue.serve(first, 1.0)
        queue.charge(first, cost)
        tokens[first.terms.user] += cost
    assert tokens == {"long": 3000, "short": 3000}


def test_adapters_of_a_user_get_equal_shares() -> None:
    queue = FairQueue()
    for number in range(20):
        queue.add(request(adapter=1), number / 100)
    queue.add(request(adapter=2), 0.5)
    queue.add(request(adapter=2), 0.6)
    assert [one.adapter for one in order(queue, 1.0)[:4]].count(2) == 2


def test_an_idle_user_saves_up_nothing() -> None:
    queue = FairQueue()
    for number in range(50):
        queue.add(request(user="busy"), number / 100)
        if number < 40:
            first = queue.first(1.0)
            assert first is not None
            queue.serve(first, 1.0)
            queue.charge(first, 10)
    for number in range(20):
        queue.add(request(user="new"), 1 + number / 100)
    first_ten = [one.terms.user for one in order(queue, 2.0)[:10]]
    assert 4 <= first_ten.count("busy") <= 6


def test_names_of_users_do_not_pile_up() -> None:
    queue, one = FairQueue(), request(1)
    for number in range(20_000):
        one.terms = Terms(user=f"user {number}")
        queue.add(one, 0.0)
        queue.serve(one, 0.0)
    assert len(queue._counters) < 10_000


@pytest.mark.parametrize(
    "terms",
    [{"priority": 1.5}, {"priority": 101}, {"deadline": 0}, {"deadline": float("inf")},
     {"deadline": "soon"}, {"deadline": True}, {"user": 3},
     {"user": "u" * 257}],
)  # fmt: skip
def test_wrong_terms_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Terms(**terms)


def scheduler(pages: int = 64, rows: int = 4, waiting: int = 100, most: int = 64) -> Any:
    clock = Clock()
    made = Scheduler(PageAllocator(pages, SIZE), rows, waiting, StepTimer(most, 16), clock=clock)
    return made, clock


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    made, _ = scheduler(pages=4)
    small = request(4, 4)
    made.add(small)
    made.admit()
    large = request(12, 4)
    made.add(large)
    made.add(request(1, 1))
    assert made.admit() == []
    made.remove(small)
    assert made.admit()[0] is large


def test_a_full_queue_says_when_to_try_again() -> None:
    made, clock = scheduler(rows=1, waiting=10)
    for _ in range(20):  # one ends every three seconds
        one = request()
        made.add(one)
        assert made.admit() == [one]
        clock.now += 3
        made.leave(one)
    for _ in range(10):
        made.add(request())
    with pytest.raises(QueueFullError) as full:
        made.add(request())
    # a mean that moves by a tenth: 3 · (1 - 0.9**19) = 2.59 s, for half of ten
    assert full.value.retry_after == pytest.approx(3 * (1 - 0.9**19) * 5)


def test_requests_expire_whether_they_wait_or_run() -> None:
    made, clock = scheduler(rows=1)
    runs, waits, patient = request(deadline=2.0), request(deadline=1.0), request()
    for one in (runs, waits, patient):
        made.add(one)
    assert made.admit() == [runs]
    clock.now += 1
    assert made.expired() == [waits]
    clock.now += 1
    assert made.expired() == [runs]
    for one in (runs, waits):
        made.remove(one)
    assert made.pages.held == 0 and made.admit() == [patient]


def test_ended_requests_do_not_stay_for_their_deadlines() -> None:
    made, _ = scheduler()
    for _ in range(1000):
        one = request(deadline=1000.0)
        made.add(one)
        made.remove(one)
        one.finish("cancelled")
    assert len(made._deadlines) < 10


def test_room_for_prompts_is_shared() -> None:
    assert share_room([10], 64) == [10]
    assert share_room([30_000, 20], 64) == [44, 20]
    assert share_room([30_000, 20, 8], 32) == [16, 8, 8]
    assert share_room([100, 100, 100], 64) == [64, 0, 0]  # of equals the oldest, not all at once
    rng = random.Random(1)
    for _ in range(300):
        wanted = [rng.randrange(1, 99) for _ in range(rng.randrange(1, 9))]
        room = rng.randrange(1, 200)
        shares = share_room(wanted, room)
        assert sum(shares) == min(room, sum(wanted))
        assert all(0 <= s <= w for s, w in zip(shares, wanted, strict=True))
        assert shares[0] >= min(wanted[0], room // 2)


def test_the_room_follows_measured_time() -> None:
    timer = StepTimer(512, 128, seconds=0.1)
    assert (timer.room(0), timer.room(4)) == (512, 128)
    for _ in range(50):  # 20 ms for decodes, 1 ms for a token of a prompt
        timer.observe(4, 0, 0.020)
        timer.observe(4, 100, 0.120)
    assert timer.room(4) == pytest.approx(80, abs=1)
    assert timer.room(0) == pytest.approx(400, abs=4)
    for _ in range(50):  # ten times as slow: a little goes on
        timer.observe(4, 0, 0.2)
        timer.observe(4, 32, 0.5)
    assert timer.room(4) == LEAST
    assert timer.room(32) == 4 * 32  # prompts have more tokens than answers
    for _ in range(8):  # and fast again
        timer.observe(4, 0, 0.020)
        timer.observe(4, 32, 0.052)
    assert timer.room(4) == pytest.approx(80, abs=8)
    timer.observe(4, 64, 5.0)  # a run that was held up by something else
    for _ in range(8):
        timer.observe(4, 64, 0.084)
    assert timer.room(4) == pytest.approx(80, abs=8)
    assert StepTimer(64, 128).room(60) == 4  # the executable takes no more


def run(made: Any) -> list[tuple[Request, int]]:
    """A run of all that is scheduled."""
    scheduled = made.next_tokens()
    for part in scheduled:
        made.ran(part)
    return [(part.request, part.count) for part in scheduled]


def test_equal_prompts_that_come_together_are_prefilled_once() -> None:
    made, _ = scheduler(most=32)
    prompt = list(range(50))
    first, second, third = request(prompt), request(prompt), request([*prompt[:20], 9, 9])
    for one in (first, second, third):
        made.add(one)
    made.admit()
    assert run(made) == [(first, 32)]
    assert dict(run(made)) == {first: 18, third: 2}
    while first.pending or second.pending or third.pending:
        run(made)
    assert [one.result.reused_tokens for one in (first, second, third)] == [0, 48, 20]
    assert (made.prefix_hits, made.prefix_tokens) == (2, 68)


def test_those_who_wait_go_on_where_the_first_one_leaves() -> None:
    made, _ = scheduler(most=32)
    prompt = list(range(60))
    first, second, third = (request(prompt, priority=p) for p in (9, 0, 5))
    for one in (first, second, third):
        made.add(one)
    made.admit()
    assert run(made) == [(first, 32)]
    made.remove(first)
    counts = {second: 0, third: 0}
    while second.pending or third.pending:
        for one, count in run(made):
            counts[one] += count
    assert sorted(counts.values()) == [4, 28]  # one fills the other six pages of fourteen
    assert second.result.reused_tokens + third.result.reused_tokens == 32 + 56


def test_who_fills_pages_for_an_urgent_request_is_as_urgent() -> None:
    made, clock = scheduler(pages=128, most=32)
    slow = request(list(range(60)))
    other = request([7] * 200)
    urgent = request([*range(56), 1, 2, 3], priority=5)
    made.add(other)
    clock.now += 1
    made.add(slow)
    made.admit()
    made.timer.room = lambda decodes: 8
    assert dict(run(made)) == {other: 4, slow: 4}  # half for the oldest, half for the shortest
    made.add(urgent)
    made.admit()
    assert dict(run(made)) == {slow: 8}


@pytest.mark.parametrize("seed", range(3))
def test_prompts_of_few_tokens_always_move_on(seed: int) -> None:
    """Random prefixes, priorities and cancels: every run has tokens, and all pages come back."""
    made, clock = scheduler(pages=40, rows=5, most=12)
    rng = random.Random(seed)
    filled: dict[int, list[int]] = {}
    for _ in range(1500):
        clock.now += 0.1
        if rng.random() < 0.3:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            made.add(request(prompt, rng.randrange(1, 6), priority=rng.randrange(3)))
        made.admit()
        scheduled = made.next_tokens()
        assert bool(scheduled) == bool(made.running)
        for part in scheduled:
            one = part.request
            for at in range(one.done):  # what it reuses is what it would have written
                assert filled[one.pages[at // SIZE]][at % SIZE] == one.tokens[at]
            for at in range(one.done, one.done + part.count):
                page = filled.setdefault(one.pages[at // SIZE], [-1] * SIZE)
                page[at % SIZE] = one.tokens[at]
        for part in scheduled:
            completes = part.completes
            made.ran(part)
            if completes:
                part.request.tokens.append(rng.randrange(2))
        for one in list(made.running):
            if len(one.tokens) > one.most or rng.random() < 0.03:
                made.remove(one)
    for one in [*made.running, *made.queue]:
        made.remove(one)
    assert made.pages.available == 40 and not made.pages._unready
