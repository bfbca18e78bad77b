"""Several answers as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")

_AHEAD = 16  # events that wait for a reader


async def merged(answers: Sequence[AsyncIterator[_T]]) -> AsyncIterator[tuple[int, _T]]:
    """Events of all answers as they come, each with the number of its answer."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(_AHEAD)

    async def read(number: int, events: AsyncIterator[_T]) -> None:
        try:
            async for event in events:
                await queue.put((number, event))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.ensure_future(read(i, events)) for i, events in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            number, event = await queue.get()
            if event is None:
                left -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
