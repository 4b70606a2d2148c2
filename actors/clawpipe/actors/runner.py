"""The role `actor`: this host's sandboxes, and N slots that run one rollout after another in them. Under trio.

A slot keeps one connection to the proxy, which holds the work queue. When the proxy goes away, the slot gives up
its rollout (the queue delivers it again) and connects anew. The role ends when every slot has been told that
there are no more rollouts, or at SIGTERM: then rollouts are cut, and closing the connections hands them back.
"""

from __future__ import annotations

import signal
from functools import partial

import trio

from clawpipe.actors import link
from clawpipe.actors.harness import mcp
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.proxy_link import LinkLost, ProxyLink, connect
from clawpipe.actors.rollout import Workshop, run_rollout
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.load import load_tasks
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.observe import EventLog, Progress
from clawpipe.pipeline.processes import raise_file_limit
from clawpipe.pipeline.records import Infra
from clawpipe.pipeline.runtime import Runtime

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0
INFRA_PAUSE_S = 1.0  # a host that cannot run rollouts must not burn the work queue


def main(config: Config, runtime: Runtime) -> None:
    """Runs until drained or terminated. SandboxError, TaskError."""
    raise_file_limit()
    trio.run(_act, config, runtime)


async def _act(config: Config, runtime: Runtime) -> None:
    log = EventLog("actor")
    tasks = await trio.to_thread.run_sync(load_tasks, config.tasks)
    harnesses = {entry.name: make_harness(entry, config.model) for entry in config.harness}
    async with trio.open_nursery() as nursery:
        await nursery.start(_cancel_at_signal, nursery.cancel_scope)
        progress = Progress(runtime.path(), "actor", "preparing sandboxes")
        for entry in config.harness:
            await trio.to_thread.run_sync(mcp.prepare, mcp.of(entry))
        async with Supervisor.open(config.sandbox, runtime.run_id, runtime.path("sandboxes")) as host:
            progress.finish()
            if host.missing_limits:
                log.warning("limits that this host cannot set", missing=host.missing_limits)
            workshop = Workshop(host, tasks, harnesses, config.sandbox, config.verify, runtime.path("workspaces"), log)
            async with trio.open_nursery() as slots:
                for _ in range(config.sandbox.slots):
                    slots.start_soon(partial(_slot, runtime, workshop))
        nursery.cancel_scope.cancel()


async def _cancel_at_signal(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


async def _slot(runtime: Runtime, workshop: Workshop) -> None:
    """Connects, and again after every loss, until the proxy says that there are no more rollouts."""
    delay_s = FIRST_DELAY_S
    while True:
        try:
            async with connect(runtime.proxy_socket) as proxy:
                delay_s = FIRST_DELAY_S
                await _serve(proxy, workshop)
                return
        except LinkLost as err:
            workshop.log.warning("link to the proxy lost", why=str(err))
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # the proxy is starting, or starting again
        await trio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)


async def _serve(proxy: ProxyLink, workshop: Workshop) -> None:
    """One rollout after another. LinkLost."""
    while True:
        reply = await proxy.ask(link.Take(), link.Assigned, link.Drained)
        if not isinstance(reply, link.Assigned):
            return
        outcome = await run_rollout(proxy, reply, workshop)
        if isinstance(outcome, Infra):
            workshop.log.warning(
                "rollout lost", rollout=reply.request.rollout_id, boundary=outcome.boundary, why=outcome.message
            )
            await trio.sleep(INFRA_PAUSE_S)
