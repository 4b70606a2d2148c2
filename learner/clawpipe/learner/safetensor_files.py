"""Model folders on disk: safetensors read slice by slice and written as a stream.

The safetensors package writes only what is in memory as a whole; a model that is gathered from many ranks
never is, so `write` puts the format's header first and the tensors after it as they come
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clawpipe.pipeline.errors import LearnerError

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Reader:
    """The tensors of a Hugging Face folder, by name, read as slices. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise LearnerError(f"{self._folder}: holds no *.safetensors; give a Hugging Face folder with weights")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as err:
                raise LearnerError(f"{path}: not a safetensors file ({err}); fetch or write it again") from err
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def part(self, name: str, dim: int, size: int, rank: int) -> Tensor:
        """Part `rank` of `size` equal parts of a tensor along `dim`; the file's other bytes are not read."""
        if name not in self._files:
            raise LearnerError(f"{self._folder}: no tensor {name}; config.json and the weights do not belong together")
        if size == 1:
            whole: Tensor = self._files[name].get_tensor(name)
            return whole
        tensor = self._files[name].get_slice(name)
        length = tensor.get_shape()[dim]
        if length % size:
            raise LearnerError(f"{self._folder}: {name} has {length} rows or columns, not a multiple of {size}")
        here = slice(rank * length // size, (rank + 1) * length // size)
        part: Tensor = tensor[here] if dim == 0 else tensor[:, here]
        return part


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Writes `tensors`, which come in the order of `shapes`, to one safetensors file; renamed when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(_header(shapes, dtype))
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (name, shape, dtype) == (given, tuple(tensor.shape), tensor.dtype), (name, given)
            file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_shards(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int | None,
) -> None:
    """`write` as one file, or as numbered ones of `max_bytes` of tensors at most and the index that names them all.

    A tensor of more bytes is a file of its own.
    """
    shards = list(_shards(shapes, dtype, max_bytes))
    if len(shards) < 2:
        write(folder / "model.safetensors", shapes, dtype, tensors)
        return
    coming = iter(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / name, shard, dtype, islice(coming, len(shard)))
        places |= dict.fromkeys(shard, name)
    assert next(coming, None) is None, "more tensors than shapes"
    index = {"metadata": {"total_size": sum(_size(shape, dtype) for shape in shapes.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int | None
) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    used = 0
    for name, shape in shapes.items():
        size = _size(shape, dtype)
        if shard and max_bytes is not None and used + size > max_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = shape
        used += size
    yield shard


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _size(shape, dtype)
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def staging_of(target: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return target.with_name(target.name + ".incomplete")


def copy_sidecars(source: Path, staging: Path, dtype: torch.dtype) -> None:
    """Makes `staging` anew with everything of a model folder but its weights; config.json names the new dtype."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, staging / path.name)
    config_path = staging / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def finish_folder(staging: Path, target: Path) -> None:
    """Gives a complete folder its name."""
    staging.replace(target)
