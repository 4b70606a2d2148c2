"""Started by torchrun: compares layouts with Hugging Face and writes what it measured, as JSON, on rank 0.

Usage: layout_checks.py OUT WORK TENSOR,EXPERT[,KIND] ...
"""

import json
import os
import sys
from pathlib import Path

import hf_oracle
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from clawpipe.learner import cpu, critic, hf, numerics, parallel
from clawpipe.learner.model import build_model
from clawpipe.pipeline.config import ParallelConfig

TEMPERATURE = 0.8


def main() -> None:
    out, work, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    results = {}
    for layout in layouts:
        tensor, expert, kind = (*layout.split(","), "qwen3_moe")[:3]
        results[layout] = check(int(tensor), int(expert), kind, Path(work))
        parallel_state.destroy_model_parallel()
    parallel.stop()
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(results))


def check(tensor: int, expert: int, kind: str, work: Path) -> dict[str, float]:
    world = int(os.environ["WORLD_SIZE"])
    config = ParallelConfig(processes=world, tensor=tensor, expert=expert, expert_tensor=1 if expert > 1 else tensor)
    ranks = parallel.start(config)
    oracle = hf_oracle.build_hf(kind)
    source = work / kind
    if ranks.is_main:
        hf_oracle.save_hf(oracle, source)
    dist.barrier()
    cases = [hf_oracle.pack(hf_oracle.random_sequences("random", seed), seed) for seed in range(ranks.data_size)]
    model = build_model(source, config, torch.float32, seed=ranks.rank)
    hf.load(model, source)
    measured = compare(model, oracle, cases, ranks)
    measured |= empty_share(model, oracle, cases, ranks)
    measured |= compare_values(source, config, oracle, cases, ranks)
    measured |= round_trip(model, source, work / f"out-{tensor}-{expert}-{kind}", ranks)
    return measured


def gradients(model: torch.nn.Module, case: hf_oracle.Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of one rank's case, and (on rank 0) all gradients averaged over the data ranks."""
    return weighted_gradients(model, case, lambda wrapped: numerics.token_logprobs(wrapped, case.forest, TEMPERATURE))


def weighted_gradients(model, case, compute) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with cpu.CudaAsCpu():
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    wrapped.zero_grad_buffer()
    found_E = compute(wrapped)
    (case.weight_E * found_E).sum().backward()
    with cpu.CudaAsCpu():
        finalize_model_grads([wrapped])
    return found_E.detach(), {name: grad.clone() for name, grad in hf.export(wrapped, lambda p: p.main_grad)}


def compare(model, oracle, cases, ranks) -> dict[str, float]:
    logprobs, expected = hf_oracle.hf_gradients(oracle, cases, TEMPERATURE)
    logprob_E, found = gradients(model, cases[ranks.data_rank])
    worst = torch.tensor((logprob_E - logprobs[ranks.data_rank]).abs().max().item())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"logprob": worst.item()} | gradient_error(found, expected, ranks)


def compare_values(source, config, oracle, cases, ranks) -> dict[str, float]:
    """The same for the value model, whose head is Hugging Face's `score`."""
    model = critic.build_value_model(source, config, torch.float32, seed=5)
    critic.load_trunk(model, source)
    with torch.no_grad():
        model.value_head.weight.copy_(hf_oracle.value_head()[None])
    values, expected = hf_oracle.hf_value_gradients(oracle, cases)
    case = cases[ranks.data_rank]
    value_E, found = weighted_gradients(model, case, lambda wrapped: critic.state_values(wrapped, case.forest))
    worst = torch.tensor((value_E - values[ranks.data_rank]).abs().max().item())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if ranks.is_main:
        assert found.keys() == expected.keys()
    return {"value": worst.item()} | gradient_error(found, expected, ranks, "_of_values")


def gradient_error(found, expected, ranks, suffix: str = "") -> dict[str, float]:
    if not ranks.is_main:
        return {}
    expected = {name: grad for name, grad in expected.items() if name in found}
    error = {name: (found[name] - expected[name]).abs().max().item() for name in found}
    worst = max(error, key=error.__getitem__)
    print(suffix, "worst gradient", worst, error[worst], "of", expected[worst].abs().max().item())
    largest = max(grad.abs().max().item() for grad in expected.values())
    return {f"gradient{suffix}": error[worst], f"gradient_size{suffix}": largest}


def empty_share(model, oracle, cases, ranks) -> dict[str, float]:
    """The last data rank has one token and no entry, as when a batch has fewer forests than ranks."""
    if ranks.data_size == 1:
        return {}
    cases = [*cases[:-1], hf_oracle.pack([[3]], 0)]
    _, expected = hf_oracle.hf_gradients(oracle, cases[:-1], TEMPERATURE)
    expected = {name: grad * (len(cases) - 1) / len(cases) for name, grad in expected.items()}
    _, found = gradients(model, cases[ranks.data_rank])
    return gradient_error(found, expected, ranks, "_with_an_empty_rank")


def round_trip(model, source, target, ranks) -> dict[str, float]:
    hf.save_hf_folder(model, source, target)
    if not ranks.is_main:
        return {}
    from safetensors.torch import load_file

    written, original = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert written.keys() == original.keys()
    return {"round_trip": max((written[name] - original[name]).abs().max().item() for name in original)}


if __name__ == "__main__":
    main()
