"""What vLLM loads into each of its processes: our way of taking weights, "clawpipe_shm".

`register` is the entry point of the group `vllm.general_plugins`. The engine itself lives in `worker.py`, which
vLLM imports in the worker only, when a server was started with this backend; so nothing of vLLM is imported
by those who merely look at this package.
"""

from __future__ import annotations

BACKEND = "clawpipe_shm"


def register() -> None:
    """Adds the backend to vLLM's registry. vLLM calls it in every process, in some more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "clawpipe.actors.engines.worker", "SharedMemoryWeightTransfer"
        )
