"""One run of the kill matrix: its processes, who kills them, and who starts them again."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from chaos.forks import Forks
from chaos.kills import ANSWERED, Kill
from chaos.run_folder import prepare, set_up
from clawpipe.pipeline import nats_server
from clawpipe.pipeline.processes import free_port, kill_session, owned

HERE = Path(__file__).parent
POLL_S = 0.01
LONGEST_RUN_S = 120.0
STOP_S = 20.0
LEARNER_END_S = 10.0  # one that was killed at the very end comes back to a run that is over, and is stopped
LONGEST_PAUSE_S = 0.4  # before a part starts again; the launcher takes a second
MOMENT_S = 2.0  # how long a kill waits for its moment
USER_ERROR = 2  # the exit code at which the launcher gives up


@dataclass
class Part:
    """A process that is started again whenever it dies."""

    argv: list[str]
    log: Path
    pid: int | None = None
    again_s: float = 0.0  # when to start it
    over: bool = False  # it has ended by itself
    killed: bool = False  # by us


class NotInTime(AssertionError):
    """What was waited for did not come."""


class Scene:
    """The parts of one run. `events` says what happened, for the failure message."""

    def __init__(self, folder: Path, model_dir: Path, forks: Forks, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self._forks = forks
        self._dice = random.Random(f"scene-{seed}")
        self._began_s = time.monotonic()
        self.events: list[str] = []
        self._own_deaths: list[str] = []
        self.config, self.runtime = prepare(folder, model_dir, seed)
        self.parts = {name: self._part(name, argv) for name, argv in self._commands().items()}

    def _part(self, name: str, argv: list[str]) -> Part:
        return Part(argv, self.folder / "logs" / f"{name}.log")

    def _commands(self) -> dict[str, list[str]]:
        run = str(self.folder)
        roles = {role: ["clawpipe", "run", role, "--run-dir", run] for role in ("pipeline", "proxy", "actor")}
        return {
            "nats": [nats_server.binary(), "-c", str(self.folder / "nats" / "server.conf")],
            "engine": [sys.executable, str(HERE / "engine_program.py"), run, str(free_port())],
            **roles,
            "learner": [sys.executable, str(HERE / "learner_program.py"), run],
        }

    # The course of a run ----------------------------------------------------------------------------------

    def play(self, kills: tuple[Kill, ...]) -> None:
        """Starts everything, kills by the plan, and waits until pipeline and learner have ended by themselves."""
        self._start("nats")
        anyio.run(set_up, self.config, self.runtime)
        for name in self.parts:
            if name != "nats":
                self._start(name)
        self._until(lambda: self._answers() > 0, "an answer of the engine")
        for kill in kills:
            self._carry_out(kill)
        self._until(self._is_over, "the end of the pipeline")
        with suppress(NotInTime):
            self._until(lambda: self.parts["learner"].over, "the end of the learner", LEARNER_END_S)

    def stop(self) -> None:
        """Ends what runs still, the broker not, as the launcher does it: a learner that is left waits for nobody."""
        for name, part in self.parts.items():
            part.over = True
            if name != "nats" and part.pid is not None:
                self._signal(part.pid, signal.SIGKILL if name == "learner" else signal.SIGTERM)
        running = [part for name, part in self.parts.items() if name != "nats"]
        self._until(lambda: all(part.pid is None for part in running), "the end of all parts", STOP_S)

    def clear(self) -> None:
        """SIGKILL to all that is left."""
        for part in self.parts.values():
            part.over = True
            if part.pid is not None:
                kill_session(part.pid)

    def processes(self) -> list[int]:
        """Pids of what was started, by the mark that they bear, and runs still."""
        return [pid for pid in owned(self._forks.owner) if pid != self._forks.pid]

    def _is_over(self) -> bool:
        """The pipeline has ended by itself; nobody may be killed any more, since nobody would answer."""
        return self.parts["pipeline"].over

    # Killing ----------------------------------------------------------------------------------------------

    def _carry_out(self, kill: Kill) -> None:
        self._wait(kill.gap_s)
        self._until(lambda: self._are_up(kill.victims) or self._is_over(), f"{kill.victims} to be up")
        self._await_moment(kill.moment)
        self._wait(kill.late_s)
        if self._is_over():
            return
        for name in kill.victims:
            part = self.parts[name]
            if part.pid is not None and not part.over:
                part.killed = True
                self._signal(part.pid, signal.SIGKILL)
                self._note(f"killed {name}" + (f" ({kill.moment})" if kill.moment else ""))

    def _are_up(self, names: tuple[str, ...]) -> bool:
        return all(self.parts[name].pid is not None for name in names)

    def _await_moment(self, moment: str) -> None:
        if not moment:
            return
        before = self._seen(moment)
        deadline_s = time.monotonic() + MOMENT_S
        while self._seen(moment) == before and time.monotonic() < deadline_s:
            self._turn()

    def _seen(self, moment: str) -> int:
        """How often it has come."""
        if moment == ANSWERED:
            return self._answers()
        return _lines(self.folder / "phases.log", f"{moment}\n".encode())

    def _answers(self) -> int:
        return _lines(self.folder / "answers.jsonl", b"\n")

    # Keeping alive ----------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        part = self.parts[name]
        part.killed = False
        part.pid = self._forks.start(part.argv, part.log)

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float = LONGEST_RUN_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline_s:
                raise NotInTime(f"no {what} after {timeout_s:.0f} s\n{self.story()}")
            self._turn()

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._turn()

    def _turn(self) -> None:
        """Notices who has ended, and starts again what is due."""
        time.sleep(POLL_S)
        self._forks.listen()
        for name, part in self.parts.items():
            if part.pid is not None and part.pid in self._forks.codes:
                self._ended(name, part, self._forks.codes.pop(part.pid))
            if part.pid is None and not part.over and time.monotonic() >= part.again_s > 0:
                self._start(name)

    def _ended(self, name: str, part: Part, code: int) -> None:
        assert part.pid is not None
        kill_session(part.pid)
        part.pid = None
        if part.over or (code == 0 and name not in ("nats", "engine")):
            self._note(f"{name} has ended ({code})")
            part.over = True
            return
        part.again_s = time.monotonic() + self._dice.uniform(0.02, LONGEST_PAUSE_S)
        if not part.killed:
            self._note(f"{name} died of itself with {code}")
            self._own_deaths.append(f"{name} died of itself with {code}: {_tail(part.log)}")
            assert code != USER_ERROR, f"{name} cannot be kept running\n{self.story()}"

    def _signal(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    def _note(self, event: str) -> None:
        self.events.append(f"{time.monotonic() - self._began_s:6.2f} s  {event}")

    def own_deaths(self) -> Iterator[str]:
        """What died without being killed: nothing may hide behind a restart."""
        yield from self._own_deaths

    def story(self) -> str:
        """What happened, and the end of every log."""
        logs = [f"--- {part.log}\n{_tail(part.log)}" for part in self.parts.values()]
        return "\n".join([f"seed {self.seed}; run folder {self.folder}", *self.events, *logs])


def _lines(path: Path, text: bytes) -> int:
    return path.read_bytes().count(text) if path.exists() else 0


def _tail(path: Path, num_bytes: int = 1500) -> str:
    return path.read_bytes()[-num_bytes:].decode(errors="replace") if path.exists() else ""
