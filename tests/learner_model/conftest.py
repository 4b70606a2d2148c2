"""The Hugging Face oracle, and a learner that is one process."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

with warnings.catch_warnings():
    # Megatron-Core and torch warn about absent GPU packages while they are imported.
    warnings.simplefilter("ignore")
    import torch

    from clawpipe.learner import hf, numerics, parallel  # noqa: F401
    from clawpipe.learner.model import PolicyModel, build_model
    from clawpipe.pipeline.config import ParallelConfig

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron-Core's warnings about itself are not ours; all others stay errors."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning:megatron"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"))


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"learner_model_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take far longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """hf_oracle.py as a module."""
    return _load("hf_oracle")


@pytest.fixture
def one_process() -> Iterator[ParallelConfig]:
    """A learner of one process, without torchrun."""
    config = ParallelConfig()
    with parallel.session(config):
        yield config


@pytest.fixture(scope="session")
def moe_folder(oracle: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3-MoE in Hugging Face's form."""
    return oracle.save_hf(oracle.build_hf("qwen3_moe"), tmp_path_factory.mktemp("moe"))


@pytest.fixture
def moe(moe_folder: Path, one_process: ParallelConfig) -> PolicyModel:
    """The same model in ours, in one process."""
    model = build_model(moe_folder, one_process, torch.float32, seed=1)
    hf.load(model, moe_folder)
    return model
