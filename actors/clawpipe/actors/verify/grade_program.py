"""Runs a task's grader inside the grader's sandbox, and keeps its verdict out of reach of what it starts.

    python3 -I -c THIS_FILE GRADER_PROGRAM WORKSPACE

Some graders run scripts that the agent wrote. Such a script may print, may try to open its parent's output or
memory through /proc, and may outlive the grader. So this process is made undumpable, which closes its /proc
entries to other processes; the grader's standard output is kept in memory; and when the grader has ended well
it is written behind a token that nobody else knows: it comes in a file that is deleted before the grader runs.
`-I` and this program's own sys.path keep modules that lie in the workspace from being imported.
"""

import ctypes
import io
import os
import sys

PR_SET_DUMPABLE = 4
TOKEN_FILE = ".verdict-token"  # in HOME


def take_token() -> str:
    """The token, which is then nowhere else."""
    path = os.path.join(os.environ["HOME"], TOKEN_FILE)
    with open(path, encoding="ascii") as file:
        token = file.read()
    os.unlink(path)
    return token


def run_grader(program: str) -> int:
    """Runs the program as `python3 program` would. Its exit status."""
    sys.path.insert(0, os.path.dirname(program))
    sys.argv = sys.argv[1:]
    module = type(sys)("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    token = take_token()
    verdict = sys.stdout
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    captured = sys.stdout.buffer
    status = run_grader(sys.argv[1])
    if status == 0:
        verdict.write(f"\n{token}{captured.getvalue().decode('utf-8', 'replace')}{token}\n")
        verdict.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
