"""A learner without a model, for the kill matrix: the learner's own script and conversation, weights that are a list.

    learner_program.py RUN_DIR

Its weights are what it has been trained on: the batches, each with its rollouts' ids. A checkpoint holds them beside
updates, version and cursor, as one file that appears by its name when it is whole. Each step takes a moment, and
<run_dir>/phases.log says which one has begun, so that a kill can meet it.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec import Struct

from clawpipe.learner.conversation import connect
from clawpipe.learner.script import Command, Position, Save, Script, Stage, Stop, Train, Trained, Wait
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.observe import start_log
from clawpipe.pipeline.records import StreamCursor, WeightVersion

SHORTEST_S, LONGEST_S = 0.03, 0.15  # of a phase
UNFINISHED = ".unfinished-"


class Lesson(Struct, frozen=True, kw_only=True):
    """A batch that was trained."""

    batch_id: str
    rollouts: tuple[str, ...]


class Checkpoint(Struct, frozen=True, kw_only=True):
    """What a checkpoint file holds."""

    updates: int
    version: int
    cursor: StreamCursor
    lessons: tuple[Lesson, ...]

    @property
    def trained(self) -> list[str]:
        """Rollout ids in the order in which they were trained."""
        return [rollout_id for lesson in self.lessons for rollout_id in lesson.rollouts]


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All whole ones, in the order of their versions."""
    return [msgspec.json.decode(path.read_bytes(), type=Checkpoint) for path in sorted(folder.glob("v*.json"))]


class StandIn:
    """Carries out the script's commands."""

    def __init__(self, folder: Path, phases: TextIO, lessons: tuple[Lesson, ...]) -> None:
        self._folder = folder
        self._phases = phases
        self._lessons = lessons
        self._dice = random.Random()

    def lead(self, commands: Generator[Command, Any, None]) -> None:
        """To the end of the script."""
        reply = None
        while True:
            try:
                reply = self._execute(commands.send(reply))
            except StopIteration:
                return

    def _execute(self, command: Command) -> Any:
        match command:
            case Stage():
                self._phase("staging")
                return WeightVersion(version=command.version, path="none", num_bytes=0, created_s=time.time())
            case Train():
                return self._train(command)
            case Save():
                return self._save(command)
            case Wait() | Stop():
                return None

    def _train(self, command: Train) -> Trained:
        self._phase("training")
        body = msgspec.msgpack.decode(command.body)
        rollouts = tuple(dict.fromkeys(row["rollout_id"] for row in body["rollouts"]))
        self._lessons = (*self._lessons, Lesson(batch_id=body["batch_id"], rollouts=rollouts))
        return Trained(num_steps=1)

    def _save(self, command: Save) -> str:
        data = msgspec.json.encode(
            Checkpoint(updates=command.updates, version=command.version, cursor=command.cursor, lessons=self._lessons)
        )
        path = self._folder / f"v{command.version:07d}-u{command.updates:07d}.json"
        unfinished = path.with_name(UNFINISHED + path.name)
        with unfinished.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self._phase("writing")
            file.write(data[len(data) // 2 :])
        unfinished.replace(path)
        self._phase("written")
        return str(path)

    def _phase(self, name: str) -> None:
        """Says that it has begun, and takes its time."""
        self._phases.write(f"{name}\n")
        self._phases.flush()
        time.sleep(self._dice.uniform(SHORTEST_S, LONGEST_S))


def main(run_dir: Path) -> None:
    config, runtime = configuration.restore(run_dir / "config.json"), runtimes.load(run_dir)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    folder = runtime.checkpoint_dir
    folder.mkdir(exist_ok=True)
    newest = next(reversed(checkpoints(folder)), None)
    with (run_dir / "phases.log").open("a") as phases, connect(config.nats, runtime) as conversation:
        last = conversation.last_weights()
        version = 0 if last is None else last.version + 1
        position = Position(
            version=version,
            updates=newest.updates if newest else 0,
            cursor=newest.cursor if newest else StreamCursor(),
        )
        script = Script(
            conversation=conversation,
            position=position,
            push_every=config.push.every_updates,
            checkpoint_every=config.checkpoint.every_updates,
            max_nonfinite_in_row=config.learner.max_nonfinite_in_row,
            stop=lambda: bool(told),
            log=start_log("learner"),
        )
        StandIn(folder, phases, newest.lessons if newest else ()).lead(script.run())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
