"""The one permanent thread that mounts, makes network namespaces and starts every sandbox.

bubblewrap's `--die-with-parent` is PR_SET_PDEATHSIG, and that follows the THREAD that forked: a worker thread
that expires takes its sandboxes with it. The thread also owns the host's private mount namespace, so mounts
exist nowhere else and vanish with the process, whatever ends it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

T = TypeVar("T")
_Job = Callable[[], None]


class ForkingThread:
    """Runs short blocking jobs one after another. Made by `open_thread`."""

    def __init__(self) -> None:
        # Jobs of tasks that wait for them, so never longer than the number of tasks; None ends the thread.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="clawpipe-forking")
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Not cancellable, so that what the job made always has an owner."""
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(job())
            except Exception as error:
                result.set_exception(error)
            token.run_sync_soon(done.set)

        self._jobs.put(work)
        with trio.CancelScope(shield=True):
            await done.wait()
        return result.result()

    async def close(self) -> None:
        """Ends the thread, and with it the mount namespace that it owns."""
        self._jobs.put(None)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)


@asynccontextmanager
async def open_thread() -> AsyncIterator[ForkingThread]:
    """The thread, for as long as the block lasts."""
    thread = ForkingThread()
    try:
        yield thread
    finally:
        await thread.close()
