"""Starts the parts of a run as forks of this process, which has imported what they need: a proxy that was killed is
back in a quarter of a second, where vLLM's parsers alone take four to import.

    forks_program.py MODEL_DIR      {"argv": [...], "log": PATH} per line on standard input

Each order is answered with {"pid": PID}, and when that process ends with {"pid": PID, "code": CODE} (negative: the
signal). argv[0] "clawpipe" is what the console entry of that name does; anything else is a program's path. Every part
is a session of its own. When standard input ends, so does everything that runs still.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from clawpipe.actors import runner  # noqa: F401  # imported for those who are forked
from clawpipe.actors.proxy import app  # noqa: F401
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.pipeline import cli, service  # noqa: F401

POLL_S = 0.01


def main() -> None:
    warm_up(Path(sys.argv[1]))
    running: set[int] = set()
    tell({"ready": True})
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S if running else None)
        if readable:
            line = sys.stdin.readline()
            if not line:
                break
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                become(order["argv"], order["log"])
            running.add(pid)
            tell({"pid": pid})
        reap(running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def warm_up(model_dir: Path) -> None:
    """Imports what the roles import: the proxy's half by making its parts once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn about each other
        renderer = Renderer(model_dir)
        TurnParser(renderer.tokenizer, "hermes", "", renderer.generation_prompt)
    gc.freeze()


def reap(running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def become(argv: list[str], log: str) -> NoReturn:
    """The child's side: it never returns."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1024)
    if argv[0] != "clawpipe":
        os.execvp(argv[0], argv)
    code = 1
    try:
        code = console_entry(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def console_entry(argv: list[str]) -> int:
    """What the installed `clawpipe` does."""
    sys.argv = argv
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
