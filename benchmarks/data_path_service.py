"""The role `pipeline` as `clawpipe run pipeline` starts it, watched by cProfile.

data_path_service.py RUN_DIR PROFILE_FILE
"""

from __future__ import annotations

import cProfile
import sys
from pathlib import Path

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline import service
from clawpipe.pipeline.observe import start_log


def main(run_dir: Path, profile: Path) -> None:
    """Serves until SIGTERM."""
    config = configuration.restore(run_dir / "config.json")
    start_log("pipeline", config.observe.level)
    with cProfile.Profile() as watched:
        service.main(config, runtimes.load(run_dir))
    watched.dump_stats(profile)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
