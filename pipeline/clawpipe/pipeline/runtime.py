"""What a run's processes must know beside the configuration: where it lives and whom to talk to."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from clawpipe.pipeline.errors import ConfigError


class Runtime(Struct, frozen=True, kw_only=True):
    """Written once by the launcher as <run_dir>/runtime.json, read by every role."""

    run_id: str  # unique to this run folder; survives --resume
    run_dir: str
    nats_url: str = ""
    nats_token: str = ""
    engine_urls: tuple[str, ...] = ()
    init_model_dir: str = ""  # Hugging Face folder with config, tokenizer and some weights: what engines start from
    start_model_dir: str = ""  # Hugging Face folder whose weights the learner starts from
    demos_path: str = ""
    push_dir: str = ""  # a folder of this run's own on storage that the engines share
    resume: bool = False

    def path(self, *parts: str) -> Path:
        """A path inside the run folder."""
        return Path(self.run_dir, *parts)

    @property
    def proxy_socket(self) -> Path:
        """Where the proxy listens for the supervisor's slots."""
        return self.path("proxy.sock")

    @property
    def checkpoint_dir(self) -> Path:
        """Where the learner keeps its checkpoints."""
        return self.path("checkpoints")


def save(runtime: Runtime) -> None:
    """Writes <run_dir>/runtime.json atomically."""
    target = runtime.path("runtime.json")
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(runtime)))
    temporary.replace(target)


def load(run_dir: Path) -> Runtime:
    """Reads what `save` wrote. ConfigError when the folder holds no run."""
    try:
        return msgspec.json.decode((run_dir / "runtime.json").read_bytes(), type=Runtime)
    except (OSError, msgspec.MsgspecError) as err:
        raise ConfigError(f"{run_dir}: holds no run ({err}); give the run folder of a `clawpipe up`") from err
