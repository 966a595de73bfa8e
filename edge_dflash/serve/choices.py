"""The candidates of one request: their increments as they come, their time together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from edge_dflash.result import Increment, Plan


async def merged(
    streams: Sequence[AsyncIterator[Increment]], patience: float
) -> AsyncGenerator[tuple[int, Increment] | None, None]:
    """Increments of all streams as they come, each with its stream's index; None when none came for a while.

    The error of any is raised.
    """
    increments = [aiter(stream) for stream in streams]
    following = {_next(one): index for index, one in enumerate(increments)}
    try:
        while following:
            done, _ = await asyncio.wait(following, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for future in sorted(done, key=following.__getitem__):
                try:
                    part = future.result()
                except StopAsyncIteration:
                    del following[future]
                    continue
                index = following.pop(future)
                following[_next(increments[index])] = index
                yield index, part
    finally:
        for future in following:
            future.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def _next(increments: AsyncIterator[Increment]) -> asyncio.Future[Increment]:
    return asyncio.ensure_future(anext(increments))


def span(plans: Sequence[Plan]) -> tuple[float, float]:
    """When the plans of one request began and ended, in seconds from its call."""
    timings = [plan.timings for plan in plans]
    return min(one.queue_seconds for one in timings), max(one.total_seconds for one in timings)
