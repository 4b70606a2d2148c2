"""The independent side of the comparisons: Hugging Face models on separate sequences, and a simple tree packer.

Imported by the tests (through conftest) and by layout_checks.py, which torchrun starts.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 128
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def build_hf(kind: str, seed: int = 0, **overrides: object) -> nn.Module:
    """A small random float32 model with weights large enough for every part to matter."""
    if kind == "qwen3_moe":
        moe = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**{**_SHARED, **moe, "tie_word_embeddings": False, **overrides})
        model = Qwen3MoeForCausalLM(config)
    elif kind == "qwen3":
        config = Qwen3Config(**{**_SHARED, "intermediate_size": 96, "tie_word_embeddings": True, **overrides})
        model = Qwen3ForCausalLM(config)
    else:
        config = LlamaConfig(**{**_SHARED, "intermediate_size": 96, "tie_word_embeddings": False, **overrides})
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # The router's logits are spread so that rounding does not change an expert choice.
            scale = 0.5 if name.endswith("mlp.gate.weight") else 0.12
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else scale * noise)
    return model.float()


def save_hf(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def per_expert(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers keeps experts fused in memory; on disk, and for us, each has its own tensors."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                base = f"{name.removesuffix('gate_up_proj')}{expert}."
                out[base + "gate_proj.weight"], out[base + "up_proj.weight"] = fused.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return out


@dataclass
class Case:
    """A packed forest with loss entries, and the sequences that it stands for."""

    forest: SimpleNamespace
    weight_E: torch.Tensor
    sequences: list[list[int]]
    places: list[list[int]]  # for every sequence, the packed index of each of its tokens


def random_sequences(kind: str, seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    if kind == "line":
        return [tokens(61)]
    if kind == "star":
        trunk = tokens(30)
        return [trunk + tokens(rng.randint(1, 4)) for _ in range(40)]
    if kind == "comb":
        spine, out = tokens(12), []
        for _ in range(20):
            out.append(spine + tokens(rng.randint(1, 4)))
            spine = spine + tokens(rng.randint(1, 6))
        return [*out, spine]
    if kind == "group":  # more than one block of the attention's plan
        prompt, out = tokens(280), []
        for _ in range(4):
            rollout = prompt
            for _ in range(3):
                out.append(rollout + tokens(rng.randint(1, 9)))
                rollout = rollout + tokens(rng.randint(20, 60))
            out.append(rollout)
        return out
    out = [tokens(rng.randint(5, 40)), tokens(7)]
    for _ in range(9):
        prefix = rng.choice(out)
        out.append(prefix[: rng.randint(1, len(prefix))] + tokens(rng.randint(1, 25)))
    return out


def pack(sequences: list[list[int]], seed: int = 0, entry_share: float = 0.6) -> Case:
    """Packs token by token into a trie in depth-first order; some entries stand twice, as of two rollouts."""
    children: list[dict[int, int]] = [{}]
    for sequence in sequences:
        node = 0
        for token in sequence:
            if token not in children[node]:
                children[node][token] = len(children)
                children.append({})
            node = children[node][token]
    tokens, position, parent = [], [], []
    stack = [(token, child, 0, -1) for token, child in reversed(children[0].items())]
    while stack:
        token, node, depth, above = stack.pop()
        here = len(tokens)
        tokens.append(token)
        position.append(depth)
        parent.append(above)
        stack += [(token, child, depth + 1, here) for token, child in reversed(children[node].items())]
    size = len(tokens)
    end = [next((k for k in range(i + 1, size) if position[k] <= position[i]), size) for i in range(size)]
    places = [_locate(sequence, tokens, parent) for sequence in sequences]
    rng = random.Random(seed)
    entries = [i for i, above in enumerate(parent) if above >= 0 and rng.random() < entry_share]
    entries += entries[::3]
    as_tensor = torch.tensor
    forest = SimpleNamespace(
        tokens_T=as_tensor(tokens),
        position_T=as_tensor(position),
        parent_T=as_tensor(parent),
        end_T=as_tensor(end),
        entry_token_E=as_tensor(entries, dtype=torch.int64),
    )
    weight_E = torch.randn(len(entries), generator=torch.Generator().manual_seed(seed)) / max(1, len(entries))
    return Case(forest, weight_E, sequences, places)


def _locate(sequence: list[int], tokens: list[int], parent: list[int]) -> list[int]:
    at, out = -1, []
    for token in sequence:
        at = next(i for i, above in enumerate(parent) if above == at and tokens[i] == token)
        out.append(at)
    return out


def hf_entries(model: nn.Module, case: Case, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every entry, from one plain causal pass per separate sequence."""
    picked, entropy, of_token = [], [], {}
    count = 0
    for sequence, places in zip(case.sequences, case.places, strict=True):
        tokens = torch.tensor(sequence)
        logprobs = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        picked.append(logprobs.gather(1, tokens[1:, None])[:, 0])
        entropy.append(-(logprobs.exp() * logprobs).sum(-1))
        for step, place in enumerate(places[1:]):
            of_token.setdefault(place, count + step)
        count += len(sequence) - 1
    index_E = torch.tensor([of_token[place] for place in case.forest.entry_token_E.tolist()], dtype=torch.int64)
    return torch.cat(picked)[index_E], torch.cat(entropy)[index_E]


def hf_gradients(
    model: nn.Module, cases: list[Case], temperature: float
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Every case's log-probabilities, and the gradients of mean over cases of sum(weight * logprob)."""
    model.zero_grad()
    logprobs = [hf_entries(model, case, temperature)[0] for case in cases]
    loss = sum((case.weight_E * logprob).sum() for case, logprob in zip(cases, logprobs, strict=True)) / len(cases)
    loss.backward()
    named = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return [logprob.detach() for logprob in logprobs], per_expert(named)


def value_head() -> torch.Tensor:
    """[H]: a head large enough for the values to matter."""
    return 0.3 * torch.randn(_SHARED["hidden_size"], generator=torch.Generator().manual_seed(17))


def hf_value_gradients(model: nn.Module, cases: list[Case]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Every case's values, and the gradients of mean over cases of sum(weight * value), the head's as score.weight.

    The value of an entry is the head's output on the hidden state before its token, sequence by sequence.
    """
    model.zero_grad()
    head = value_head().requires_grad_()
    values = [_hf_values(model, head, case) for case in cases]
    loss = sum((case.weight_E * value).sum() for case, value in zip(cases, values, strict=True)) / len(cases)
    loss.backward()
    named = {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in model.named_parameters()
        if name != "lm_head.weight"
    }
    return [value.detach() for value in values], {**per_expert(named), "score.weight": head.grad[None]}


def _hf_values(model: nn.Module, head: torch.Tensor, case: Case) -> torch.Tensor:
    of_token = {}
    for sequence, places in zip(case.sequences, case.places, strict=True):
        hidden = model.model(torch.tensor([sequence])).last_hidden_state[0]
        for step, place in enumerate(places[1:]):
            of_token.setdefault(place, hidden[step] @ head)
    return torch.stack([of_token[place] for place in case.forest.entry_token_E.tolist()])
