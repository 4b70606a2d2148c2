"""The configuration: one TOML file, one frozen Struct per table, resolved once by `load`.

Nothing below the process entry points receives the whole `Config`; each part is given its table.
What a run reads ([model] path, [algorithm] value_path, [sandbox] rootfs, [[tasks]] path, [[harness.mcp]] documents) is
relative to the folder of the configuration file, with `~` for the user's home; [run] dir and [push] dir are relative to
the current folder.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from clawpipe.pipeline.correction_tables import DEFAULT_KIND
from clawpipe.pipeline.correction_tables import AutoThrottle as AutoThrottle
from clawpipe.pipeline.correction_tables import BinaryTvConfig as BinaryTvConfig
from clawpipe.pipeline.correction_tables import CispoConfig as CispoConfig
from clawpipe.pipeline.correction_tables import CorrectionConfig as CorrectionConfig
from clawpipe.pipeline.correction_tables import DecoupledConfig as DecoupledConfig
from clawpipe.pipeline.correction_tables import GeometricMaskConfig as GeometricMaskConfig
from clawpipe.pipeline.correction_tables import IcePopConfig as IcePopConfig
from clawpipe.pipeline.correction_tables import ToprConfig as ToprConfig
from clawpipe.pipeline.correction_tables import TruncatedConfig as TruncatedConfig
from clawpipe.pipeline.correction_tables import UncorrectedConfig as UncorrectedConfig
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.explain import explain
from clawpipe.pipeline.harness_tables import AgentLoopConfig as AgentLoopConfig
from clawpipe.pipeline.harness_tables import ClaudeCodeConfig as ClaudeCodeConfig
from clawpipe.pipeline.harness_tables import CodexConfig as CodexConfig
from clawpipe.pipeline.harness_tables import HarnessConfig as HarnessConfig
from clawpipe.pipeline.harness_tables import InstalledHarnessConfig as InstalledHarnessConfig
from clawpipe.pipeline.harness_tables import McpConfig as McpConfig
from clawpipe.pipeline.harness_tables import OpenClawConfig as OpenClawConfig
from clawpipe.pipeline.harness_tables import OpenCodeConfig as OpenCodeConfig
from clawpipe.pipeline.harness_tables import QwenCodeConfig as QwenCodeConfig
from clawpipe.pipeline.learner_tables import AlgorithmConfig as AlgorithmConfig
from clawpipe.pipeline.learner_tables import ConstantRate as ConstantRate
from clawpipe.pipeline.learner_tables import CosineRate as CosineRate
from clawpipe.pipeline.learner_tables import GrpoConfig as GrpoConfig
from clawpipe.pipeline.learner_tables import LearnerConfig as LearnerConfig
from clawpipe.pipeline.learner_tables import LinearRate as LinearRate
from clawpipe.pipeline.learner_tables import ParallelConfig as ParallelConfig
from clawpipe.pipeline.learner_tables import PpoConfig as PpoConfig
from clawpipe.pipeline.learner_tables import RateConfig as RateConfig
from clawpipe.pipeline.learner_tables import Recompute as Recompute
from clawpipe.pipeline.tables import Fraction, Name, NonNegative, Port, Positive, Seconds, Table


class RunConfig(Table, frozen=True, kw_only=True):
    """[run]"""

    name: str = "run"
    updates: Positive = 100
    seed: int = 0
    dir: str = "runs"  # the run folder is <dir>/<name>-<time>; --run-dir overrides it
    drain_timeout_s: Seconds = 60.0  # how long a drain waits for rollouts in flight


class TinyModelConfig(Table, frozen=True, kw_only=True):
    """[model.tiny]: a Qwen3-MoE built on this machine on first use, with its own tokenizer, and cached.

    Hidden sizes are multiples of 32 (vLLM's CPU kernel for experts).
    """

    vocab_size: Positive = 1024  # at most; fewer when the demonstrations hold no more
    hidden_size: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 4
    head_dim: Positive = 32
    num_experts: Positive = 4
    experts_per_token: Positive = 2
    expert_size: Positive = 64
    initializer_range: Annotated[float, Meta(gt=0)] = 0.05
    seed: int = 0


class ColdStartConfig(Table, frozen=True, kw_only=True):
    """[model.coldstart]: supervised training on scripted demonstrations before the first rollout.

    Stage 1 trains on clean demonstrations, for `max_steps` at most, until the model gives held-out ones the mean
    probability `gate_probability`; stage 2 trains `flawed_steps` more with `flawed_fraction` of flawed ones,
    which leaves something for reinforcement learning to do.
    """

    batch_size: Positive = 16
    max_steps: Positive = 600
    check_every_steps: Positive = 5
    gate_probability: Fraction = 0.2
    flawed_steps: NonNegative = 100
    flawed_fraction: Fraction = 0.7
    muon_lr: Annotated[float, Meta(gt=0)] = 0.02
    adamw_lr: Annotated[float, Meta(gt=0)] = 0.01
    warmup_steps: NonNegative = 20


class ModelConfig(Table, frozen=True, kw_only=True):
    """[model]: exactly one of `path` (a Hugging Face folder) and [model.tiny]."""

    name: str = "policy"  # what harnesses send as the model's name
    path: str = ""
    tiny: TinyModelConfig | None = None
    coldstart: ColdStartConfig | None = None
    context_tokens: Positive = 65536
    tool_parser: str = "hermes"  # vLLM's name
    reasoning_parser: str = ""  # vLLM's name; empty: the model does not reason in marked blocks

    def __post_init__(self) -> None:
        if bool(self.path) == (self.tiny is not None):
            raise ValueError("set exactly one of `path` and [model.tiny]")
        if self.coldstart is not None and self.tiny is None:
            raise ValueError("[model.coldstart] needs [model.tiny]")


class NatsConfig(Table, frozen=True, kw_only=True):
    """[nats]: an embedded server, or the `url` of yours."""

    url: str = ""
    port: Port = 0  # of the embedded server; 0: a free one
    prefix: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")] = "clawpipe"  # of all streams and subjects
    max_store_bytes: Annotated[int, Meta(ge=64 * 1024**2)] = 4 * 1024**3
    # So many of the records that are done with stay for `clawpipe replay`; at most a quarter of max_store_bytes.
    keep_records_bytes: NonNegative = 512 * 1024**2
    connect_timeout_s: Seconds = 10.0


class EnginesConfig(Table, frozen=True, kw_only=True):
    """[engines]: the embedded vLLM engines, or the `urls` of yours."""

    urls: tuple[str, ...] = ()
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    port: Port = 0  # of the first embedded engine; 0: free ones
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    eager: bool = False
    max_num_seqs: Positive = 64  # sequences that one engine samples at the same time
    kv_cache_gib: Positive = 1  # on CPU; a GPU takes what vLLM finds free
    threads: Positive = 1  # per engine process
    start_timeout_s: Seconds = 600.0
    health_interval_s: Seconds = 5.0
    max_restarts: NonNegative = 5  # of one engine, one soon after the other
    extra_args: tuple[str, ...] = ()  # of the vLLM server, after ours


class ProxyConfig(Table, frozen=True, kw_only=True):
    """[proxy]. Sampling is part of the policy: it comes from here, never from the harness."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0
    max_completion_tokens: Positive = 8192
    keepalive_s: Seconds = 5.0  # between signs of life to a harness that waits for its answer
    retry_window_s: Annotated[float, Meta(ge=0)] = 10.0  # an equal request within it gets the same answer
    settle_timeout_s: Seconds = 30.0  # how long calls in flight may finish when their harness has ended
    engine_wait_s: Seconds = 600.0  # how long a call waits for an engine that restarts
    publish_timeout_s: Seconds = 30.0  # until NATS has stored a record
    on_malformed_tool_call: Literal["text", "resample"] = "text"  # what a call that cannot be parsed is turned into
    max_resamples: Positive = 2  # of one turn; what is malformed even then goes out as text
    history_thinking: Literal["keep", "template"] = "keep"  # of earlier turns: as sampled, or as the template says
    max_parallel_calls: Positive = 32  # of one rollout; more are told to try again
    max_connections: Positive = 128  # of one rollout; more are closed at once


class SandboxConfig(Table, frozen=True, kw_only=True):
    """[sandbox]"""

    rootfs: str = ""  # empty: prepared from this machine's programs, cached
    slots: Positive = 32  # rollouts at the same time on this host
    wall_clock_s: Seconds = 600.0
    memory_bytes: Positive = 512 * 1024**2  # this and the following: of one sandbox
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    max_processes: Positive = 128
    workspace_bytes: Positive = 64 * 1024**2  # that an agent may add to its task's files
    workspace_files: Positive = 20_000
    scratch_bytes: Positive = 64 * 1024**2  # of /tmp, and of HOME: both are memory
    max_output_bytes: Positive = 4 * 1024**2  # of the harness; more ends it
    collect_max_files: Positive = 5_000  # in what an agent leaves, its task's files not counted
    collect_max_bytes: Positive = 64 * 1024**2
    first_uid: Positive = 200_000  # host uids of the sandboxes count up from here


class FilingTasksConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="filing"):
    """[[tasks]] kind = "filing": the generated small task family of the quickstart."""

    name: Name = "filing"
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 2000
    seed: int = 0
    folders: Positive = 4
    stems: Positive = 14
    rows: Positive = 3


class ClawGymTasksConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="clawgym"):
    """[[tasks]] kind = "clawgym": rows {prompt, hook_code, input_files, ...} of a JSONL file."""

    path: str
    name: Name = "clawgym"
    limit: NonNegative = 0  # 0: all
    ids: tuple[str, ...] = ()  # empty: all


TasksConfig = FilingTasksConfig | ClawGymTasksConfig


class VerifyConfig(Table, frozen=True, kw_only=True):
    """[verify]: the grader's sandbox."""

    timeout_s: Seconds = 60.0
    memory_bytes: Positive = 512 * 1024**2
    max_processes: Positive = 64


class ScheduleConfig(Table, frozen=True, kw_only=True):
    """[schedule]: `groups_per_step` groups of `group_size` rollouts make one batch."""

    groups_per_step: Positive = 8
    group_size: Positive = 8
    max_staleness: NonNegative = 4
    refill: bool = True  # a rollout lost to infrastructure is run again; the third loss in one place closes it
    # A group with fewer usable rollouts is dropped. GRPO learns nothing from a single one: 2 keeps it out of the batch.
    min_group: Positive = 1
    # GRPO: a group of equal rewards is dropped instead of taking a place in a batch. PPO learns from it: no effect.
    skip_zero_spread: bool = False

    def __post_init__(self) -> None:
        if self.min_group > self.group_size:
            raise ValueError(
                f"min_group = {self.min_group} is more than group_size = {self.group_size}: every group would be "
                "dropped; lower min_group"
            )


class LeafQuantile(Table, frozen=True, kw_only=True):
    """[replay.leaf_cap]: the cap is this quantile of the leaves of the last `window_rollouts` of the same harness,
    within `at_least` and `at_most`; it is `at_most` until so many rollouts were seen."""

    quantile: Annotated[float, Meta(gt=0, le=1)] = 0.99
    window_rollouts: Annotated[int, Meta(ge=16)] = 512
    at_least: Positive = 4
    at_most: Positive = 64

    def __post_init__(self) -> None:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least = {self.at_least} is more than at_most = {self.at_most}; swap them")


WINDOW_GROUPS = 64  # by default


class ReplayConfig(Table, frozen=True, kw_only=True):
    """[replay]: the bounded queue between assembler and learner."""

    capacity_tokens: Positive = 50_000_000  # this or capacity_rollouts reached, the record stream is not read on
    capacity_rollouts: Positive = 100_000
    close_timeout_s: Seconds = 120.0  # how long a manifest waits for its calls
    leaf_cap: Positive | LeafQuantile = 16  # a rollout whose main conversation has more leaves is dropped whole
    # Calls of sub-agents and compactions: not trained, or each role measured against the same role of its group.
    auxiliary: Literal["exclude", "own_group"] = "exclude"
    max_reuse: Positive = 1  # how often a group may be trained in all
    # Oldest complete groups first; windowed: only those less than window_groups ahead of the oldest that still runs.
    sampling: Literal["oldest", "windowed"] = "oldest"
    window_groups: Positive = WINDOW_GROUPS

    def __post_init__(self) -> None:
        if self.sampling == "oldest" and self.window_groups != WINDOW_GROUPS:
            raise ValueError(
                f'window_groups = {self.window_groups} is for sampling = "windowed"; set it, or leave window_groups out'
            )


class PushConfig(Table, frozen=True, kw_only=True):
    """[push]: weights into the running engines."""

    dir: str = "/dev/shm"  # where versions are staged; every engine reads it
    every_updates: Positive = 1
    clear_cache: bool = True  # running requests get their KV recomputed under the new weights
    timeout_s: Seconds = 120.0  # of one push into one engine


class CheckpointConfig(Table, frozen=True, kw_only=True):
    """[checkpoint]"""

    every_updates: Positive = 10
    # Checkpoints on disk. With 1, none is left when the newest turns out to hold weights that give no finite gradient.
    keep_last: Positive = 2
    keep_every: NonNegative = 0  # updates: a checkpoint at a multiple stays for good, beside keep_last; 0: none

    def __post_init__(self) -> None:
        if self.keep_every % self.every_updates:
            raise ValueError(
                f"keep_every = {self.keep_every} is not a multiple of every_updates = {self.every_updates}: most of "
                "what it is to keep would never be written; change one of them"
            )


class ObserveConfig(Table, frozen=True, kw_only=True):
    """[observe]"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    status_interval_s: Seconds = 1.0


class Config(Table, frozen=True, kw_only=True):
    """The whole file."""

    model: ModelConfig
    harness: tuple[HarnessConfig, ...]
    tasks: tuple[TasksConfig, ...]
    run: RunConfig = RunConfig()
    nats: NatsConfig = NatsConfig()
    engines: EnginesConfig = EnginesConfig()
    proxy: ProxyConfig = ProxyConfig()
    sandbox: SandboxConfig = SandboxConfig()
    verify: VerifyConfig = VerifyConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = GrpoConfig()
    correction: CorrectionConfig = TruncatedConfig()
    push: PushConfig = PushConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        for table, items in (("harness", self.harness), ("tasks", self.tasks)):
            if not items:
                raise ValueError(f"[[{table}]] is missing; add at least one")
            names = [item.name for item in items]
            if len(set(names)) < len(names):
                raise ValueError(f"two [[{table}]] entries share a name; give each its own `name`")
        if self.replay.sampling == "windowed" and self.replay.window_groups < self.schedule.groups_per_step:
            raise ValueError(
                f"[replay] window_groups = {self.replay.window_groups} is less than [schedule] groups_per_step = "
                f"{self.schedule.groups_per_step}: no batch would ever be full; raise window_groups"
            )
        if isinstance(self.algorithm, GrpoConfig) and self.schedule.group_size == 1:
            raise ValueError(
                '[schedule] group_size = 1 with [algorithm] kind = "grpo": nothing would be trained, since a single '
                "rollout has no baseline; raise group_size"
            )
        if self.engines.urls and self.engines.count != 1:
            raise ValueError("[engines] count is for embedded engines; leave it out with `urls`")


def load(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Reads, checks and resolves the file.

    `overrides` maps dotted keys ("run.updates") to values that replace the file's. Raises ConfigError with
    file, key and what to do.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror}); check the path") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: not valid TOML: {err}") from err
    for key, value in (overrides or {}).items():
        _set(data, key, value)
    if isinstance(data.get("correction"), dict):
        data["correction"].setdefault("kind", DEFAULT_KIND)
    if (where := _unusable(data)) is not None:
        raise ConfigError(f"{path}: {where} is inf, nan or holds a NUL character; give a finite number or plain text")
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{path}: {explain(str(err), Config)}") from err
    return _resolve(config, path.resolve().parent)


def dump(config: Config) -> bytes:
    """The resolved configuration as JSON, as it is stored with the run."""
    return msgspec.json.format(msgspec.json.encode(config))


def restore(path: Path) -> Config:
    """A configuration that `dump` wrote. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.MsgspecError) as err:
        raise ConfigError(f"{path}: not a stored configuration ({err}); start the run anew") from err


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Replaces one key of the parsed file; a number picks an item of a list of tables."""
    here: Any = data
    *tables, key = dotted.split(".")
    try:
        for table in tables:
            here = here[int(table)] if isinstance(here, list) else here.setdefault(table, {})
        here[key] = value
    except (IndexError, ValueError, TypeError, AttributeError) as err:
        raise ConfigError(f"--set {dotted}: there is no such table in the configuration; check the key") from err


def _unusable(value: Any, where: str = "") -> str | None:
    """The key of the first value that TOML can write and a run cannot use: JSON, which stores it, has no inf or nan,
    and no path holds a NUL character."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = (_unusable(item, f"{where}.{key}".lstrip(".")) for key, item in pairs)
        return next((key for key in found if key is not None), None)
    bad = (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, str) and "\0" in value)
    return where if bad else None


def _resolve(config: Config, base: Path) -> Config:
    replace = msgspec.structs.replace

    def absolute(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve()) if path else path

    def served(entry: HarnessConfig) -> HarnessConfig:
        if isinstance(entry, AgentLoopConfig):
            return entry
        return replace(entry, mcp=tuple(replace(server, documents=absolute(server.documents)) for server in entry.mcp))

    tasks = tuple(
        replace(source, path=absolute(source.path)) if isinstance(source, ClawGymTasksConfig) else source
        for source in config.tasks
    )
    algorithm = config.algorithm
    if isinstance(algorithm, PpoConfig):
        algorithm = replace(algorithm, value_path=absolute(algorithm.value_path))
    return replace(
        config,
        algorithm=algorithm,
        model=replace(config.model, path=absolute(config.model.path)),
        sandbox=replace(config.sandbox, rootfs=absolute(config.sandbox.rootfs)),
        harness=tuple(map(served, config.harness)),
        tasks=tasks,
    )
