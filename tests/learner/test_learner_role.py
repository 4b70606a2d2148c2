"""The role against a real nats-server, with a pipeline service that follows a script."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file

from clawpipe.learner import checkpoint, loop
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import CheckpointConfig, Config
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.launch import USER_ERROR
from clawpipe.pipeline.records import (
    AskCursor,
    BatchReady,
    Chunk,
    Committed,
    Cursor,
    Data,
    Finished,
    Hello,
    LearnerMessage,
    LearnerReply,
    Lease,
    NotYet,
    Ok,
    Stepped,
    StreamCursor,
    WeightVersion,
    float_bytes,
)
from clawpipe.pipeline.runtime import Runtime

CHUNK = 700


class Service:
    """Answers the learner from a list of replies to its leases, and keeps what it said."""

    def __init__(self, leases: list[Batch | LearnerReply | Callable[[], LearnerReply]]) -> None:
        self.leases = leases
        self.heard: list[LearnerMessage] = []
        self.weights: list[WeightVersion] = []
        self._bodies: dict[str, bytes] = {}

    async def answer(self, message: LearnerMessage) -> LearnerReply:
        self.heard.append(message)
        match message:
            case Lease():
                return self._lease(self.leases.pop(0))
            case Chunk():
                return Data(body=self._bodies[message.batch_id][message.index * CHUNK :][:CHUNK])
            case AskCursor():
                steps = len(self.of(Stepped))
                return Cursor(cursor=StreamCursor(sequence=100 + steps, done=("r1",)))
        return Ok()

    def _lease(self, reply: Batch | LearnerReply | Callable[[], LearnerReply]) -> LearnerReply:
        if callable(reply):
            return reply()
        if not isinstance(reply, Batch):
            return reply
        body = msgspec.msgpack.encode(reply)
        self._bodies[reply.batch_id] = body
        digest = hashlib.blake2b(body).hexdigest()
        return BatchReady(batch_id=reply.batch_id, num_chunks=-(-len(body) // CHUNK), digest=digest)

    def of(self, kind: type) -> list:
        return [message for message in self.heard if type(message) is kind]

    def kinds(self) -> list[str]:
        """Names of the messages in order, without the polling."""
        return [type(m).__name__ for m in self.heard if not isinstance(m, Lease | Chunk)]


@contextmanager
def serving(service: Service, runtime: Runtime) -> Iterator[None]:
    """Runs the service on an event loop of its own, beside the learner on this thread."""
    with start_blocking_portal("asyncio") as portal:
        connection = Broker.connect(runtime.nats_url, runtime.nats_token)
        with portal.wrap_async_context_manager(connection) as broker:
            portal.call(broker.setup, 64 * 1024 * 1024)
            future = portal.start_task_soon(broker.serve_learner, service.answer)
            yield
            future.cancel()


def settings(model_dir: Path, algorithm: dict | None = None, **learner) -> Config:
    raw = {
        "model": {"path": str(model_dir), "context_tokens": 64},
        "harness": [{"kind": "agentloop"}],
        "tasks": [{"kind": "filing"}],
        "schedule": {"max_staleness": 2},
        "learner": {"lr": 1e-3, **learner},
        "checkpoint": {"every_updates": 2, "keep_last": 2},
    }
    return msgspec.convert(raw | {"algorithm": algorithm or {"kind": "grpo"}}, Config)


@pytest.fixture
def runtime(nats_server, model_dir, tmp_path) -> Runtime:
    folder, push = tmp_path / "run", tmp_path / "push"
    for path in (folder / "logs", push):
        path.mkdir(parents=True)
    return Runtime(
        run_id="cp-test",
        run_dir=str(folder),
        nats_url=nats_server.url,
        nats_token=nats_server.token,
        start_model_dir=str(model_dir),
        push_dir=str(push),
    )


def versions(runtime: Runtime) -> list[int]:
    return sorted(int(path.stem[1:]) for path in Path(runtime.push_dir).glob("*.safetensors"))


def last_weights(runtime: Runtime) -> WeightVersion | None:
    with start_blocking_portal("asyncio") as portal:
        connection = Broker.connect(runtime.nats_url, runtime.nats_token)
        with portal.wrap_async_context_manager(connection) as broker:
            return portal.call(broker.last_weights)


def test_a_run_from_hello_to_the_last_checkpoint(runtime, model_dir, make_batch):
    batches = [make_batch(version=n, seed=n, batch_id=f"b{n}") for n in range(3)]
    service = Service([NotYet(), batches[0], NotYet(), batches[1], batches[2], Finished()])
    with serving(service, runtime):
        loop.main(settings(model_dir, lr_schedule={"kind": "constant", "warmup_updates": 2}), runtime)
    assert service.kinds() == [
        *("Hello", "Stepped", "Stepped", "AskCursor", "Committed"),
        *("Stepped", "AskCursor", "Committed"),
    ]
    assert service.of(Hello) == [Hello(version=0, updates=0, cursor=StreamCursor())]
    stepped = service.of(Stepped)
    assert [(s.batch_id, s.version, s.updates) for s in stepped] == [("b0", 1, 1), ("b1", 2, 2), ("b2", 3, 3)]
    assert all({"train_s", "wait_s", "push_s", "fetch_s", "loss", "k3", "ess"} <= s.metrics.keys() for s in stepped)
    assert "checkpoint_s" in stepped[2].metrics
    assert "checkpoint_s" not in stepped[1].metrics
    assert stepped[0].metrics["reward_mean"] == pytest.approx(0.25)
    assert [s.metrics["lr"] for s in stepped] == pytest.approx([5e-4, 1e-3, 1e-3])
    # The checkpoint holds the cursor that the service named for it.
    assert [(c.version, c.updates, c.cursor.sequence) for c in service.of(Committed)] == [(2, 2, 102), (3, 3, 103)]
    found = checkpoint.latest(runtime.checkpoint_dir)
    assert (str(found.path), found.manifest.cursor) == (
        service.of(Committed)[-1].path,
        service.of(Committed)[-1].cursor,
    )
    # Every version was staged under its number; the three newest are there, and they differ.
    assert versions(runtime) == [1, 2, 3]
    assert last_weights(runtime).version == 3
    assert last_weights(runtime).path == f"{runtime.push_dir}/v3.safetensors"
    one, three = (load_file(f"{runtime.push_dir}/v{n}.safetensors") for n in (1, 3))
    assert any(not torch.equal(tensor, three[name]) for name, tensor in one.items())


def test_a_resumed_learner_serves_its_weights_under_the_next_free_version(runtime, model_dir, make_batch):
    batches = [make_batch(version=n, seed=n, batch_id=f"b{n}") for n in range(3)]
    # The third update is lost: the learner dies after it, before a checkpoint.
    first = Service([*batches, Data(body=b"")])
    with serving(first, runtime), pytest.raises(LearnerError, match="answered Data where NotYet was due"):
        loop.main(settings(model_dir), runtime)
    assert last_weights(runtime).version == 3
    second = Service([make_batch(version=4, batch_id="b4"), Finished()])
    with serving(second, runtime):
        loop.main(settings(model_dir), msgspec.structs.replace(runtime, resume=True))
    assert second.of(Hello) == [Hello(version=4, updates=2, cursor=StreamCursor(sequence=102, done=("r1",)))]
    assert [(s.version, s.updates) for s in second.of(Stepped)] == [(5, 3)]
    two, four = (load_file(f"{runtime.push_dir}/v{n}.safetensors") for n in (3, 4))
    assert versions(runtime) == [3, 4, 5]
    assert any(not torch.equal(tensor, four[name]) for name, tensor in two.items())
    saved = checkpoint.latest(runtime.checkpoint_dir)
    assert (saved.manifest.version, saved.manifest.updates) == (5, 3)


def test_checkpoints_at_every_so_manieth_update_outlive_the_newest(runtime, model_dir, make_batch):
    kept = CheckpointConfig(every_updates=1, keep_last=1, keep_every=2)
    config = msgspec.structs.replace(settings(model_dir), checkpoint=kept)
    service = Service([*(make_batch(version=n, seed=n) for n in range(4)), make_batch(version=4), Finished()])
    with serving(service, runtime):
        loop.main(config, runtime)
    assert [path.name[:8] for path in sorted(runtime.checkpoint_dir.iterdir())] == ["u0000002", "u0000004", "u0000005"]


def spoiled(batch: Batch, **changes: bytes) -> Batch:
    """The batch with another first forest."""
    first, *rest = batch.forests
    return msgspec.structs.replace(batch, forests=(msgspec.structs.replace(first, **changes), *rest))


def test_a_bad_batch_is_refused_and_training_goes_on(runtime, model_dir, make_batch):
    future = make_batch(version=7, batch_id="future")
    good = make_batch(version=0, batch_id="good")
    damaged = BatchReady(batch_id="good", num_chunks=1, digest="0" * 128)
    nan = spoiled(good, entry_logprob=float_bytes([float("nan")] * 15))
    uneven = spoiled(good, position=good.forests[0].position[:-4])
    service = Service([future, nan, uneven, good, damaged, Finished()])
    with serving(service, runtime):
        loop.main(settings(model_dir), runtime)
    refused, without_numbers, without_tokens, stepped, broken = service.of(Stepped)
    assert "versions outside 0..0" in refused.refused
    assert "rollouts r0, r1, r2" in refused.refused
    assert (refused.version, refused.updates) == (0, 0)
    for message, reason in ((without_numbers, "logprobs that are not finite"), (without_tokens, "lengths disagree")):
        assert reason in message.refused
        assert "rollouts r0, r1, r2" in message.refused
        assert (message.version, message.updates, message.masked_tokens) == (0, 0, {})
    assert (stepped.refused, stepped.version, stepped.updates) == ("", 1, 1)
    assert "digest" in broken.refused
    assert (broken.version, broken.updates) == (1, 1)


def test_sigterm_ends_with_a_checkpoint_of_the_step_in_hand(runtime, model_dir, make_batch):
    def interrupt() -> LearnerReply:
        os.kill(os.getpid(), signal.SIGTERM)
        return NotYet()

    before = signal.getsignal(signal.SIGTERM)
    service = Service([make_batch(version=0), interrupt, NotYet(), NotYet()])
    with serving(service, runtime):
        loop.main(settings(model_dir), runtime)
    assert service.kinds() == ["Hello", "Stepped", "AskCursor", "Committed"]
    found = checkpoint.latest(runtime.checkpoint_dir)
    assert (found.manifest.version, found.manifest.updates) == (1, 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_that_is_broken_stops_and_keeps_its_checkpoint(runtime, model_dir, make_batch):
    config = settings(model_dir, lr=1e30)
    service = Service([make_batch(version=0), *(make_batch(version=1) for _ in range(8))])
    with serving(service, runtime), pytest.raises(LearnerError, match="not finite in 5 updates in a row") as error:
        loop.main(config, runtime)
    lost = service.of(Stepped)[1:]
    assert [(s.version, s.updates) for s in lost] == [(1, 1)] * 4
    assert all(s.masked_tokens == {"nonfinite_gradient": 25} for s in lost)
    assert all(s.metrics["num_nonfinite"] == 1.0 for s in lost)
    assert "at version 1; there is no checkpoint yet: start again with a lower [learner] lr" in str(error.value)


def explosive(batch: Batch) -> Batch:
    """A batch that breaks no rule, whose gradient's norm overflows."""
    rows = tuple(msgspec.structs.replace(row, advantage=1e30 * row.advantage) for row in batch.rollouts)
    return msgspec.structs.replace(batch, rollouts=rows)


def test_the_error_of_broken_training_names_the_last_good_checkpoint(runtime, model_dir, make_batch):
    good = [make_batch(version=n, seed=n) for n in range(3)]
    service = Service([*good, *(explosive(make_batch(version=3)) for _ in range(2))])
    with serving(service, runtime), pytest.raises(LearnerError, match="in 2 updates in a row") as error:
        loop.main(settings(model_dir, max_nonfinite_in_row=2), runtime)
    [saved] = runtime.checkpoint_dir.iterdir()
    assert f"the last good checkpoint, {saved}, is kept: go on from it with --resume" in str(error.value)
    assert checkpoint.latest(runtime.checkpoint_dir).path == saved
    assert checkpoint.latest(runtime.checkpoint_dir).manifest.updates == 2


def test_a_checkpoint_of_weights_that_give_no_finite_gradient_is_not_called_good(runtime, model_dir, make_batch):
    good = [make_batch(version=n, seed=n) for n in range(4)]
    service = Service([*good, explosive(make_batch(version=4))])
    with serving(service, runtime), pytest.raises(LearnerError) as error:
        loop.main(settings(model_dir, max_nonfinite_in_row=1), runtime)
    first, second = sorted(runtime.checkpoint_dir.iterdir())
    assert f"the newest checkpoint, {second}, holds these weights: remove it to --resume" in str(error.value)
    assert f"the last good one, {first}" in str(error.value)
    # Resumed all the same, the weights are not saved anew over the good ones.
    again = Service([explosive(make_batch(version=5)) for _ in range(2)])
    with serving(again, runtime), pytest.raises(LearnerError, match="the one before, if there is one"):
        loop.main(settings(model_dir, max_nonfinite_in_row=2), msgspec.structs.replace(runtime, resume=True))
    assert sorted(runtime.checkpoint_dir.iterdir()) == [first, second]


def test_only_a_step_ends_a_row_of_updates_without_one(runtime, model_dir, make_batch):
    bad, future = explosive(make_batch(version=0)), make_batch(version=9)
    service = Service([bad, bad, make_batch(version=0), bad, future, bad, Finished()])
    with serving(service, runtime):
        loop.main(settings(model_dir, max_nonfinite_in_row=3), runtime)
    assert [(s.version, s.updates) for s in service.of(Stepped)] == [(0, 0), (0, 0), *[(1, 1)] * 4]
    short = Service([bad, future, bad])
    with serving(short, runtime), pytest.raises(LearnerError, match="in 2 updates in a row"):
        loop.main(settings(model_dir, max_nonfinite_in_row=2), msgspec.structs.replace(runtime, resume=True))


@pytest.mark.torchrun
def test_two_ranks_end_for_good_when_training_is_broken(runtime, model_dir, make_batch):
    config = settings(model_dir, parallel={"processes": 2}, max_nonfinite_in_row=1)
    Path(runtime.run_dir, "config.json").write_bytes(configuration.dump(config))
    runtimes.save(runtime)
    argv = [str(Path(sysconfig.get_path("scripts"), "clawpipe")), "run", "learner", "--run-dir", runtime.run_dir]
    with serving(Service([explosive(make_batch(version=0))]), runtime):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == USER_ERROR, done.stderr[-4000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("clawpipe: the gradient was not finite in 1 updates in a row at version 0; there is no ")


def _repeated(make_batch: Callable[..., Batch], count: int, version: int = 1) -> list[Batch]:
    return [make_batch(version=version, batch_id=f"again{n}") for n in range(count)]


@pytest.mark.torchrun
def test_two_ranks_follow_one_conversation_and_end_on_sigterm_with_a_checkpoint(runtime, model_dir, make_batch):
    config = settings(model_dir, parallel={"processes": 2, "expert": 2})
    Path(runtime.run_dir, "config.json").write_bytes(configuration.dump(config))
    runtimes.save(runtime)
    argv = [str(Path(sysconfig.get_path("scripts"), "clawpipe")), "run", "learner", "--run-dir", runtime.run_dir]
    log = Path(runtime.run_dir, "logs", "learner.log")
    roles: list[subprocess.Popen[bytes]] = []

    def interrupt() -> LearnerReply:
        roles[0].send_signal(signal.SIGTERM)
        return NotYet()

    batches = [make_batch(version=n, batch_id=f"b{n}") for n in range(3)]
    service = Service([batches[0], NotYet(), make_batch(version=9, batch_id="future"), *batches[1:], interrupt])
    service.leases += [NotYet()] * 50
    with serving(service, runtime), log.open("ab") as output:
        roles.append(subprocess.Popen(argv, stdout=output, stderr=output))
        code = roles[0].wait(timeout=200)
    assert code == 0, log.read_text()[-4000:]
    kinds = ["Hello", "Stepped", "Stepped", "Stepped", "AskCursor", "Committed", "Stepped", "AskCursor", "Committed"]
    assert service.kinds() == kinds
    assert [(s.updates, bool(s.refused)) for s in service.of(Stepped)] == [
        (1, False),
        (1, True),
        (2, False),
        (3, False),
    ]
    assert versions(runtime) == [1, 2, 3]
    assert checkpoint.latest(runtime.checkpoint_dir).manifest.updates == 3


def test_a_batch_without_anything_to_learn_from_is_an_update_of_the_same_version(runtime, model_dir, make_batch):
    full = make_batch(version=0, batch_id="b1")
    rows = tuple(msgspec.structs.replace(row, num_trainable=0) for row in full.rollouts)
    empty = msgspec.structs.replace(full, batch_id="b0", rollouts=rows, forests=())
    service = Service([empty, full, Finished()])
    with serving(service, runtime):
        loop.main(settings(model_dir), runtime)
    assert [(s.batch_id, s.version, s.updates) for s in service.of(Stepped)] == [("b0", 0, 1), ("b1", 1, 2)]
    assert [(c.version, c.updates) for c in service.of(Committed)] == [(1, 2)]


PPO = {"kind": "ppo", "value_lr": 1e-3, "value_pretrain_updates": 2}


def returns(batch: Batch) -> Batch:
    rows = tuple(msgspec.structs.replace(row, advantage=row.reward) for row in batch.rollouts)
    return msgspec.structs.replace(batch, rollouts=rows)


def test_updates_of_pre_training_leave_version_and_weights_as_they_are(runtime, model_dir, make_batch):
    batches = [returns(make_batch(version=0, seed=n, batch_id=f"b{n}")) for n in range(4)]
    service = Service([*batches, Finished()])
    with serving(service, runtime):
        loop.main(settings(model_dir, PPO), runtime)
    stepped = service.of(Stepped)
    assert [(s.version, s.updates) for s in stepped] == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert versions(runtime) == [0, 1, 2]
    assert [(c.version, c.updates) for c in service.of(Committed)] == [(0, 2), (2, 4)]
    assert all({"value_loss", "value_mean", "advantage_std", "explained_variance"} <= s.metrics.keys() for s in stepped)
    assert ["loss" in s.metrics for s in stepped] == [False, False, True, True]
    assert all(s.metrics["staleness_max"] == n for n, s in enumerate(stepped[2:]))
    start, zero = load_file(model_dir / "model.safetensors"), load_file(f"{runtime.push_dir}/v0.safetensors")
    assert all(torch.equal(tensor, start[name]) for name, tensor in zero.items())


def test_a_resumed_learner_goes_on_in_its_pre_training_with_the_same_value_model(runtime, model_dir, make_batch):
    def given(numbers: range, version: int) -> list[Batch]:
        return [returns(make_batch(version=version, seed=n, batch_id=f"b{n}")) for n in numbers]

    config = msgspec.structs.replace(settings(model_dir, PPO), checkpoint=CheckpointConfig(every_updates=1))
    whole = Service([*given(range(4), version=0), Finished()])
    with serving(whole, runtime):
        loop.main(config, runtime)
    shutil.rmtree(runtime.checkpoint_dir)
    free = last_weights(runtime).version + 1
    first = Service([*given(range(1), version=free), Data(body=b"")])
    with serving(first, runtime), pytest.raises(LearnerError, match="answered Data"):
        loop.main(config, runtime)
    second = Service([*given(range(1, 4), version=free + 1), Finished()])
    with serving(second, runtime):
        loop.main(config, msgspec.structs.replace(runtime, resume=True))
    pieces = [*first.of(Stepped), *second.of(Stepped)]
    assert [(s.version - free, s.updates) for s in pieces] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    for name in ("value_loss", "value_mean", "advantage_std", "value_grad_norm"):
        assert [s.metrics[name] for s in pieces] == [s.metrics[name] for s in whole.of(Stepped)], name


def test_a_value_model_that_is_broken_stops_the_run(runtime, model_dir, make_batch):
    config = settings(model_dir, PPO | {"value_lr": 1e30})
    service = Service([returns(batch) for batch in (make_batch(batch_id="first"), *_repeated(make_batch, 8, 0))])
    with serving(service, runtime), pytest.raises(LearnerError, match="not finite in 5 updates in a row"):
        loop.main(config, runtime)
    assert [(s.version, s.updates) for s in service.of(Stepped)] == [(0, 1)] * 5


def test_a_checkpoint_of_grpo_is_refused_by_ppo(runtime, model_dir, make_batch):
    with serving(Service([make_batch(), Finished()]), runtime):
        loop.main(settings(model_dir), runtime)
    with serving(Service([]), runtime), pytest.raises(LearnerError, match="holds no value model"):
        loop.main(settings(model_dir, PPO), msgspec.structs.replace(runtime, resume=True))
