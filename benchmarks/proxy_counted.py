"""The role `proxy` as `clawpipe run proxy` starts it, with a count of the tokens that it encodes.

    proxy_counted.py RUN_DIR COUNT_FILE [PROFILE_FILE]

COUNT_FILE always holds the number of tokens that the tokenizer has made so far, as eight bytes. PROFILE_FILE gets
what cProfile saw of the whole life of the process.
"""

from __future__ import annotations

import cProfile
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from clawpipe.actors.proxy import app, service
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.observe import start_log


def main(run_dir: Path, count_file: Path, profile: str = "") -> None:
    """Serves until SIGTERM."""
    count = os.open(count_file, os.O_RDWR | os.O_CREAT)

    ordinary = service.Encoder

    def counted(tokenizer: Any, **options: Any) -> service.Encoder:
        """An Encoder whose tokenizer is counted: what it finds in its cache was not encoded."""
        return ordinary(_Counting(tokenizer, count), **options)

    service.Encoder = counted  # type: ignore[assignment, misc]
    config = configuration.restore(run_dir / "config.json")
    runtime = runtimes.load(run_dir)
    start_log("proxy", config.observe.level)
    if not profile:
        app.main(config, runtime)
        return
    with cProfile.Profile() as watched:
        app.main(config, runtime)
    watched.dump_stats(profile)


class _Counting:
    """The two attributes of a tokenizer that an Encoder uses."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        self.backend_tokenizer = self
        self._encode_batch = tokenizer.backend_tokenizer.encode_batch_fast
        self._count = count
        self._total = 0
        self._lock = threading.Lock()

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        """What the tokenizer says."""
        encodings = self._encode_batch(texts, **options)
        with self._lock:  # long texts are encoded in threads
            self._total += sum(len(encoding.ids) for encoding in encodings)
            os.pwrite(self._count, struct.pack("q", self._total), 0)
        return encodings


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
