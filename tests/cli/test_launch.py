"""What the launcher does beside starting processes."""

from __future__ import annotations

import fcntl
from pathlib import Path

from clawpipe.pipeline.launch import RUN_DIR_NOTE, is_running, remove_abandoned


def staged(push_root: Path, name: str, run_dir: Path) -> Path:
    folder = push_root / name
    folder.mkdir(parents=True)
    (folder / RUN_DIR_NOTE).write_text(str(run_dir))
    (folder / "v1.safetensors").write_bytes(b"weights")
    return folder


def test_staged_weights_of_killed_runs_are_removed_and_those_of_running_ones_stay(tmp_path):
    alive, killed = tmp_path / "alive", tmp_path / "killed"
    for run_dir in (alive, killed):
        run_dir.mkdir()
        (run_dir / "lock").touch()
    push_root = tmp_path / "shm"
    kept = staged(push_root, "clawpipe-cp-1", alive)
    gone = [staged(push_root, "clawpipe-cp-2", killed), staged(push_root, "clawpipe-cp-3", tmp_path / "deleted")]
    foreign = push_root / "clawpipe-cp-4"
    foreign.mkdir()
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_running(alive)
        assert not is_running(killed)
        remove_abandoned(push_root)
    assert (kept / "v1.safetensors").exists()
    assert not any(folder.exists() for folder in gone)
    assert foreign.exists()
