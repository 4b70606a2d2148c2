"""Checkpoints: what is picked, what is kept, what is restored."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clawpipe.learner import checkpoint, hf, parallel
from clawpipe.learner.critic import build_value_model, load_trunk
from clawpipe.learner.model import build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.pipeline.config import CosineRate, LearnerConfig, ParallelConfig, RateConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.records import StreamCursor

CURSOR = StreamCursor(sequence=40, done=("r7", "r9"))


class Small:
    """A model with its optimizer, and gradients that do not need data."""

    def __init__(self, model_dir: Path, dtype: str = "float32", **settings: RateConfig) -> None:
        model = build_model(model_dir, ParallelConfig(), getattr(torch, dtype), seed=0)
        hf.load(model, model_dir)
        self.model = wrap(model)
        self.optimizer = AdamW(self.model, LearnerConfig(lr=1e-2, dtype=dtype, **settings))

    def step(self, seed: int, size: float = 1.0) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.main_grad.copy_(size * torch.randn(p.shape, generator=generator))
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in hf.export(self.model)}

    def save(
        self,
        folder: Path,
        version: int,
        updates: int = 1,
        keep_last: int = 2,
        keep_every: int = 0,
        critic: Small | None = None,
    ) -> Path:
        return checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            version=version,
            updates=updates,
            cursor=CURSOR,
            keep_last=keep_last,
            keep_every=keep_every,
            critic=critic and (critic.model, critic.optimizer),
        )


class SmallCritic(Small):
    """The same with a value head."""

    def __init__(self, model_dir: Path, dtype: str = "float32", seed: int = 0) -> None:
        model = build_value_model(model_dir, ParallelConfig(), getattr(torch, dtype), seed=seed)
        load_trunk(model, model_dir)
        self.model = wrap(model)
        self.optimizer = AdamW(self.model, LearnerConfig(lr=1e-2, dtype=dtype))


@pytest.fixture
def one_process() -> Iterator[None]:
    with parallel.session(ParallelConfig()):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("one_process")
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(model_dir, tmp_path, dtype):
    first = Small(model_dir, dtype)
    first.step(1)
    first.step(2)
    first.save(tmp_path, version=2)
    saved = first.weights()
    torch.manual_seed(5)
    first.step(3)

    second = Small(model_dir, dtype)
    found = checkpoint.latest(tmp_path)
    checkpoint.load(found, second.model, second.optimizer)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in second.weights().items())
    second.step(3)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in second.weights().items())
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in second.weights().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("one_process")
def test_policy_and_value_model_go_on_from_a_checkpoint_as_if_nothing_had_happened(model_dir, tmp_path, dtype):
    policy, critic = Small(model_dir, dtype), SmallCritic(model_dir, dtype)
    policy.step(1)
    critic.step(2)
    policy.save(tmp_path, version=1, critic=critic)
    saved = policy.weights(), critic.weights()
    assert not torch.equal(saved[0]["model.norm.weight"], saved[1]["model.norm.weight"])
    policy.step(3)
    critic.step(4)

    policy_2, critic_2 = Small(model_dir, dtype), SmallCritic(model_dir, dtype, seed=9)
    found = checkpoint.latest(tmp_path)
    assert any(name.startswith("critic/") for name in found.manifest.files)
    checkpoint.load(found, policy_2.model, policy_2.optimizer, (critic_2.model, critic_2.optimizer))
    for again, before in zip((policy_2, critic_2), saved, strict=True):
        assert all(torch.equal(tensor, before[name]) for name, tensor in again.weights().items())
    policy_2.step(3)
    critic_2.step(4)
    for again, one in zip((policy_2, critic_2), (policy, critic), strict=True):
        assert all(torch.equal(tensor, one.weights()[name]) for name, tensor in again.weights().items())


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_without_a_value_model_is_refused_where_one_is_needed(model_dir, tmp_path):
    policy, critic = Small(model_dir), SmallCritic(model_dir)
    path = policy.save(tmp_path, version=1)
    assert not (path / "critic").exists()
    with pytest.raises(LearnerError, match=r"u0000001-v0000001: holds no value model.*resume with the one"):
        checkpoint.load(checkpoint.latest(tmp_path), policy.model, policy.optimizer, (critic.model, critic.optimizer))


@pytest.mark.usefixtures("one_process")
def test_the_policy_of_a_checkpoint_with_a_value_model_can_be_had_alone(model_dir, tmp_path):
    policy, again = Small(model_dir), Small(model_dir)
    policy.step(1)
    policy.save(tmp_path, version=1, critic=SmallCritic(model_dir))
    checkpoint.load(checkpoint.latest(tmp_path), again.model, again.optimizer)
    assert all(torch.equal(tensor, policy.weights()[name]) for name, tensor in again.weights().items())


@pytest.mark.usefixtures("one_process")
def test_of_checkpoints_of_one_version_the_one_with_more_updates_is_the_newest(model_dir, tmp_path):
    small = Small(model_dir)
    paths = [small.save(tmp_path, version=0, updates=updates) for updates in (9, 10, 11)]
    assert checkpoint.latest(tmp_path).path == paths[-1]
    assert sorted(path for path in tmp_path.iterdir()) == paths[1:]


@pytest.mark.usefixtures("one_process")
def test_a_resumed_schedule_has_the_rates_that_it_would_have_had(model_dir, tmp_path):
    schedule = CosineRate(warmup_updates=2, decay_updates=4, min_lr=1e-3)
    first, second = (Small(model_dir, lr_schedule=schedule) for _ in range(2))
    before = []
    for seed in range(3):
        before.append(first.optimizer.next_lr)
        first.step(seed)
    first.save(tmp_path, version=3)
    checkpoint.load(checkpoint.latest(tmp_path), second.model, second.optimizer)
    # A step that is not made leaves the schedule where it is.
    second.step(9, size=float("inf"))
    rest = {name: [] for name in ("first", "second")}
    for seed in range(3, 7):
        for name, small in (("first", first), ("second", second)):
            rest[name].append(small.optimizer.next_lr)
            small.step(seed)
    assert before == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rest["first"] == pytest.approx([8.6819805e-3, 5.5e-3, 2.3180195e-3, 1e-3])
    assert rest["second"] == rest["first"]
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in second.weights().items())


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_before_the_first_step_can_be_resumed(model_dir, tmp_path):
    first, second = Small(model_dir), Small(model_dir)
    first.save(tmp_path, version=0, updates=0)
    checkpoint.load(checkpoint.latest(tmp_path), second.model, second.optimizer)
    first.step(1)
    second.step(1)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in second.weights().items())


@pytest.mark.usefixtures("one_process")
def test_the_manifest_holds_version_updates_and_cursor(model_dir, tmp_path):
    path = Small(model_dir).save(tmp_path, version=12, updates=10)
    found = checkpoint.latest(tmp_path)
    assert found.path == path
    assert (found.manifest.version, found.manifest.updates, found.manifest.cursor) == (12, 10, CURSOR)


@pytest.mark.usefixtures("one_process")
def test_random_state_comes_back(model_dir, tmp_path):
    small = Small(model_dir)
    torch.manual_seed(11)
    small.save(tmp_path, version=1)
    expected = torch.rand(4)
    checkpoint.load(checkpoint.latest(tmp_path), small.model, small.optimizer)
    assert torch.equal(torch.rand(4), expected)


def remove_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()


def cut_manifest(path: Path) -> None:
    manifest = path / checkpoint.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:40])


def cut_shard(path: Path) -> None:
    shard = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])


def remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def cut_critic(path: Path) -> None:
    shard = max((path / "critic").glob("*.distcp"), key=lambda p: p.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])


def leave_unfinished(path: Path) -> None:
    path.rename(path.with_name(f".unfinished-{path.name}"))


@pytest.mark.parametrize("damage", [remove_manifest, cut_manifest, cut_shard, remove_metadata, leave_unfinished])
@pytest.mark.usefixtures("one_process")
def test_what_a_crash_leaves_is_never_picked(model_dir, tmp_path, damage):
    small = Small(model_dir)
    good = small.save(tmp_path, version=3, updates=3)
    damage(small.save(tmp_path, version=4, updates=4))
    assert checkpoint.latest(tmp_path).path == good


def kill_while_it_saves(program: subprocess.Popen[bytes], folder: Path) -> None:
    """Kills the program with a third checkpoint or a later one half-written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and program.poll() is None:
        if len(list(folder.glob("u*"))) == 2 and any(folder.glob(".unfinished-*")):
            program.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
            if any(folder.glob(".unfinished-*")):
                break
            program.send_signal(signal.SIGCONT)
    program.kill()
    program.wait()


@pytest.mark.usefixtures("one_process")
def test_a_learner_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(model_dir, tmp_path):
    argv = [sys.executable, str(Path(__file__).with_name("saving_program.py")), str(model_dir), str(tmp_path)]
    folder = tmp_path / "checkpoints"
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as program:
        kill_while_it_saves(program, folder)
    [half] = folder.glob(".unfinished-*")
    broken = int(half.name.rpartition("v")[2])
    found = checkpoint.latest(folder)
    assert found.manifest.version == found.manifest.cursor.sequence == broken - 1
    small = Small(model_dir)
    checkpoint.load(found, small.model, small.optimizer)
    expected = load_file(tmp_path / f"v{broken - 1}.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in small.weights().items())
    small.step(1)
    small.save(folder, version=broken, updates=broken)
    assert checkpoint.latest(folder).manifest.version == broken
    assert not half.exists()


@pytest.mark.usefixtures("one_process")
def test_half_a_value_model_makes_no_checkpoint(model_dir, tmp_path):
    small, critic = Small(model_dir), SmallCritic(model_dir)
    good = small.save(tmp_path, version=3, updates=3, critic=critic)
    cut_critic(small.save(tmp_path, version=4, updates=4, critic=critic))
    assert checkpoint.latest(tmp_path).path == good


@pytest.mark.usefixtures("one_process")
def test_the_newest_are_kept_and_leftovers_go(model_dir, tmp_path):
    small = Small(model_dir)
    for version in (1, 2):
        small.save(tmp_path, version=version, updates=version)
    (tmp_path / ".unfinished-u0000009-v0000009").mkdir()
    # A resumed run has fewer updates under a higher version.
    small.save(tmp_path, version=5, updates=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["u0000001-v0000005", "u0000002-v0000002"]
    assert checkpoint.latest(tmp_path).manifest.version == 5


@pytest.mark.usefixtures("one_process")
def test_every_so_manieth_stays_for_good_and_a_broken_one_does_not(model_dir, tmp_path):
    small = Small(model_dir)
    for updates in (0, 2, 4, 6, 8, 10):
        path = small.save(tmp_path, version=updates, updates=updates, keep_last=1, keep_every=4)
        if updates == 8:
            cut_shard(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["u0000004-v0000004", "u0000010-v0000010"]
    assert checkpoint.latest(tmp_path).manifest.updates == 10


@pytest.mark.usefixtures("one_process")
def test_what_stays_for_good_takes_no_place_of_the_newest(model_dir, tmp_path):
    small = Small(model_dir)
    for updates in (1, 2, 3, 4, 5):
        small.save(tmp_path, version=updates, updates=updates, keep_last=2, keep_every=2)
    assert [int(path.name[1:8]) for path in sorted(tmp_path.iterdir())] == [2, 4, 5]


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    import json

    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    config["moe_intermediate_size"] = 64
    (other / "config.json").write_text(json.dumps(config))
    Small(model_dir).save(tmp_path / "checkpoints", version=1)
    wide = build_model(other, ParallelConfig(), torch.float32, seed=0)
    wrapped = wrap(wide)
    optimizer = AdamW(wrapped, LearnerConfig())
    with pytest.raises(LearnerError, match="does not fit the model"):
        checkpoint.load(checkpoint.latest(tmp_path / "checkpoints"), wrapped, optimizer)
