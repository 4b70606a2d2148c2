"""Prompts that are counted cost what a call's prompt costs, and take part in the bound on calls in flight."""

from __future__ import annotations

import anyio
import pytest
from conversation import conversation

from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.messages import CallError, Fault

LONG = {"model": "m", "messages": [{"role": "user", "content": "hello " * 3000}]}


@pytest.mark.anyio
async def test_prompts_that_are_counted_take_part_in_the_bound_on_calls(renderer, parser, sampler):
    found: list[int | Fault] = []
    async with conversation(renderer, parser, sampler, max_parallel_calls=2) as talk:

        async def count() -> None:
            try:
                found.append(await talk.calls.count(talk.session, Chat().read(LONG)))
            except CallError as err:
                found.append(err.fault)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(count)
        assert found[:2] == [Fault.BUSY] * 2
        assert found[2] == found[3] > 3000
        assert talk.session.num_in_flight == 0
