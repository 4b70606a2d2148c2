"""The role `learner`: starts its ranks, then carries out rank 0's script on all of them until the run ends.

With one process everything happens here. With more, the role starts torchrun, and each rank comes back to
`main` with RANK in its environment: rank 0 runs the script and hands every command to the others.
"""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import torch
import torch.distributed as dist

from clawpipe.learner import batch, checkpoint, cpu, hf, parallel, push
from clawpipe.learner.batch import ForestTensors
from clawpipe.learner.conversation import connect
from clawpipe.learner.correction import build_correction
from clawpipe.learner.critic import build_value_model, load_value_model
from clawpipe.learner.model import DTYPES, build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.parallel import Ranks
from clawpipe.learner.ppo import Critic, make_critic, ppo_update, value_update
from clawpipe.learner.script import Command, Position, Save, Script, Stage, Stop, Train, Trained, Wait
from clawpipe.learner.shape import read_shape
from clawpipe.learner.update import Objective, Policy, Report, update
from clawpipe.pipeline.config import Config, PpoConfig
from clawpipe.pipeline.errors import ClawpipeError, LearnerError, one_line
from clawpipe.pipeline.forest import RolloutRow
from clawpipe.pipeline.observe import EventLog, Progress
from clawpipe.pipeline.processes import OWNER, start, sweep
from clawpipe.pipeline.records import StreamCursor, WeightVersion
from clawpipe.pipeline.runtime import Runtime

RANKS_GRACE_S = 30.0

_LAST_WORDS = ("logs", "learner.error")  # below the run folder

_commands = msgspec.msgpack.Decoder(Command)


def main(config: Config, runtime: Runtime) -> None:
    """Trains until the pipeline service says that the run is finished, or until SIGTERM.

    Raises LearnerError or BrokerError for what a user can act on.
    """
    if config.learner.parallel.processes > 1 and "RANK" not in os.environ:
        anyio.run(_run_ranks, config, runtime)
        return
    torch.set_num_threads(config.learner.threads)
    with (
        _stop_flag() as stop,
        parallel.session(config.learner.parallel, config.run.seed) as ranks,
        _told_to_the_role(runtime),
    ):
        learner = Learner(config, runtime, ranks)
        if not ranks.is_main:
            learner.follow()
            return
        log = EventLog("learner")
        with connect(config.nats, runtime) as conversation:
            version = push.next_version(conversation.last_weights())
            position = learner.restored(version)
            log.info("learner is up", version=version, updates=position.updates, ranks=ranks.world_size)
            script = Script(
                conversation=conversation,
                position=position,
                push_every=config.push.every_updates,
                checkpoint_every=config.checkpoint.every_updates,
                max_nonfinite_in_row=config.learner.max_nonfinite_in_row,
                stop=stop,
                log=log,
            )
            learner.lead(script.run())


@dataclass(frozen=True, slots=True)
class _Parts:
    """A rank's model with everything that was built round it."""

    policy: Policy
    optimizer: AdamW
    critic: Critic | None  # with PPO
    restored: checkpoint.Checkpoint | None
    vocab_size: int


class Learner:
    """One rank: its part of the model, and the commands that it carries out together with the others."""

    def __init__(self, config: Config, runtime: Runtime, ranks: Ranks) -> None:
        self._config = config
        self._runtime = runtime
        self._ranks = ranks
        self._objective = Objective(
            algorithm=config.algorithm,
            correction=build_correction(config.correction),
            temperature=config.proxy.temperature,
            max_staleness=config.schedule.max_staleness,
            minibatches=config.learner.minibatches,
        )
        self._parts = _build(config, runtime, ranks)

    def restored(self, version: int) -> Position:
        """Where training stands; the weights are served under the free number `version`."""
        found = self._parts.restored
        if found is None:
            return Position(version=version, updates=0, cursor=StreamCursor())
        return Position(
            version=version,
            updates=found.manifest.updates,
            cursor=found.manifest.cursor,
            saved_path=str(found.path),
        )

    def lead(self, commands: Generator[Command, Any, None]) -> None:
        """Rank 0: carries out what the script yields, with all ranks, and sends the results back."""
        try:
            command = next(commands)
            while True:
                self._broadcast(command)
                command = commands.send(self._execute(command))
        except StopIteration:
            self._broadcast(Stop())

    def follow(self) -> None:
        """The other ranks: carry out what rank 0 hands over, until Stop."""
        while not isinstance(command := self._receive(), Stop):
            self._execute(command)

    def _execute(self, command: Command) -> Any:
        match command:
            case Stage():
                return self._stage(command.version)
            case Train():
                return self._train(command)
            case Save():
                return self._save(command)
            case Wait() | Stop():
                return None

    def _stage(self, version: int) -> WeightVersion:
        folder = Path(self._runtime.push_dir)
        weights = push.stage(self._parts.policy.model, folder, version)
        if self._ranks.is_main:
            push.remove_old(folder)
        return weights

    def _train(self, command: Train) -> Trained:
        try:
            decoded = batch.decode(command.body)
            forests = batch.load(decoded, vocab_size=self._parts.vocab_size, version=command.version)
        except LearnerError as err:
            return Trained(refused=str(err))
        rate = self._parts.optimizer.next_lr
        report = self._update(command, decoded.rollouts, forests)
        return Trained(
            num_steps=report.num_steps,
            num_value_steps=report.num_value_steps,
            num_nonfinite=report.num_nonfinite,
            # The rate is that of the first step.
            metrics={**report.metrics, "lr": rate, "num_nonfinite": float(report.num_nonfinite)},
            masked_tokens=report.masked_tokens,
        )

    def _update(self, command: Train, rollouts: Sequence[RolloutRow], forests: Sequence[ForestTensors]) -> Report:
        policy, critic, objective = self._parts.policy, self._parts.critic, self._objective
        if critic is None:
            return update(policy, rollouts, forests, version=command.version, objective=objective)
        assert isinstance(objective.algorithm, PpoConfig)
        if command.updates < objective.algorithm.value_pretrain_updates:
            return value_update(critic, policy.ranks, rollouts, forests, version=command.version, objective=objective)
        return ppo_update(policy, critic, rollouts, forests, version=command.version, objective=objective)

    def _save(self, command: Save) -> str:
        critic = self._parts.critic
        path = checkpoint.save(
            self._runtime.checkpoint_dir,
            self._parts.policy.model,
            self._parts.optimizer,
            critic=None if critic is None else critic.learned,
            version=command.version,
            updates=command.updates,
            cursor=command.cursor,
            keep_last=self._config.checkpoint.keep_last,
            keep_every=self._config.checkpoint.keep_every,
        )
        return str(path)

    def _broadcast(self, command: Command) -> None:
        if self._ranks.world_size > 1:
            data = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
            dist.broadcast(torch.tensor(len(data), device=cpu.device()), src=0)
            dist.broadcast(data.to(cpu.device()), src=0)

    def _receive(self) -> Command:
        size = torch.tensor(0, device=cpu.device())
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8, device=cpu.device())
        dist.broadcast(data, src=0)
        return _commands.decode(data.cpu().numpy().tobytes())


def _build(config: Config, runtime: Runtime, ranks: Ranks) -> _Parts:
    """The model with the newest checkpoint's weights, or with those that the run starts from."""
    progress = Progress(runtime.path(), "learner", "building the model") if ranks.is_main else None
    folder = Path(runtime.start_model_dir)
    settings = config.learner
    model = build_model(folder, settings.parallel, DTYPES[settings.dtype], config.run.seed, settings.recompute)
    found = checkpoint.latest(runtime.checkpoint_dir)
    if found is None:
        hf.load(model, folder)
    wrapped = wrap(model)
    optimizer = AdamW(wrapped, settings)
    critic = _build_critic(config, folder, fresh=found is None)
    if found is not None:
        checkpoint.load(found, wrapped, optimizer, None if critic is None else critic.learned)
    if progress is not None:
        progress.finish(f"from {found.path if found else folder}")
    policy = Policy(model=wrapped, optimizer=optimizer, ranks=ranks)
    vocab_size = read_shape(folder).vocab_size
    return _Parts(policy=policy, optimizer=optimizer, critic=critic, restored=found, vocab_size=vocab_size)


def _build_critic(config: Config, folder: Path, *, fresh: bool) -> Critic | None:
    """PPO's value model; a `fresh` one as the run begins with it, else without weights of its own yet."""
    if not isinstance(config.algorithm, PpoConfig):
        return None
    settings = config.learner
    if fresh:
        model = load_value_model(config, folder)
    else:
        model = build_value_model(
            folder, settings.parallel, DTYPES[settings.dtype], config.run.seed, settings.recompute
        )
    return make_critic(model, settings, config.algorithm.value_lr)


@contextmanager
def _told_to_the_role(runtime: Runtime) -> Iterator[None]:
    """Leaves a rank's last words for the role, if a user can act on them: torchrun ends alike for all reasons."""
    try:
        yield
    except ClawpipeError as err:
        if "RANK" in os.environ:
            runtime.path(*_LAST_WORDS).write_text(one_line(err))
        raise


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM and SIGINT into a flag: the step in hand is finished, then a checkpoint is written."""
    told = False

    def tell(_signum: int, _frame: object) -> None:
        nonlocal told
        told = True

    earlier = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: told
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


async def _run_ranks(config: Config, runtime: Runtime) -> None:
    """Runs torchrun over ranks of this role; SIGTERM goes to the ranks themselves, who end in their own time."""
    scripts = Path(sysconfig.get_path("scripts"))
    argv = [
        str(scripts / "torchrun"),
        "--standalone",
        f"--nproc-per-node={config.learner.parallel.processes}",
        "--no-python",
        str(scripts / "clawpipe"),
        *("run", "learner", "--run-dir", runtime.run_dir),
    ]
    log = runtime.path("logs", "learner.log")
    last_words = runtime.path(*_LAST_WORDS)
    last_words.unlink(missing_ok=True)
    owner = f"{os.environ.get(OWNER, f'{runtime.run_id}/learner')}/ranks"
    env = {"OMP_NUM_THREADS": str(config.learner.threads)}
    try:
        async with (
            start(argv, log=log, owner=owner, name="torchrun", env=env, grace_s=RANKS_GRACE_S) as child,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_pass_on_signals, child.pid)
            code = await child.wait()
            tasks.cancel_scope.cancel()
    finally:
        # Ranks are in sessions of their own and outlive a torchrun that was killed.
        sweep(owner)
    if code and last_words.exists():
        raise LearnerError(last_words.read_text())
    if code:
        # Not a ClawpipeError: a rank that was killed is a reason to start again.
        raise SystemExit(1)


async def _pass_on_signals(torchrun: int) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            with suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(torchrun).children():
                    rank.send_signal(number)
