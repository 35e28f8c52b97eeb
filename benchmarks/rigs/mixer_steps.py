"""Steps of bases whose layers are not those of a plain decoder, and of a dense base that reads as many bytes.

All have random weights in bfloat16. The layers are of Qwen3.5-0.8B (Gated DeltaNet), LFM2-1.2B (short convolutions),
Granite 4.0 H 1B (Mamba-2) and, of DeepSeek V3's kind, of the sizes of V2 Lite (latent attention, dense MLPs); the
dense base has as many of Qwen3's, whose MLP is as wide as it takes. What a step of decodes reads: all weights, and of
each sequence its KV, or its KV and its state, which is written too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from motet.benchmarks.rigs.quantised_steps import CPU, DTYPE, SAMPLE, RandomWeights
from motet.kernels.backend import choose_kernels
from motet.workers.costs.operations import kv_bytes_of_a_token, model_size, state_bytes_of_a_sequence
from motet.workers.execution.runner import Runner
from motet.workers.memory.page_arrays import make_pool, plan_pool
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.rotary import rotary_tables
from motet.workers.models.sharding import ModelSharding
from motet.workers.parallel import Alone
from motet.workers.plan import SequencePlan, StatePlan, StepPlan, packed

BLOCK_SIZE, CONTEXT, POOL_BYTES = 16, 512, 1 << 30
DECODES = (1, 8)
SHARED: dict[str, Any] = {
    "vocab_size": 12_000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BASES: dict[str, dict[str, Any]] = {
    "delta": SHARED
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "convolution": SHARED
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": 8192,
        "layer_types": [*["conv", "conv", "full_attention"] * 5, "conv"],
    },
    "mamba": SHARED
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 0,
        "intermediate_size": 4096,
        "shared_intermediate_size": 4096,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "layer_types": [*["mamba"] * 7, "attention"] * 2,
    },
    "latent": SHARED
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 5632,
        "first_k_dense_replace": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
DENSE = SHARED | {"architectures": ["Qwen3ForCausalLM"]}


def model_of(config: dict[str, Any]) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelConfig.from_folder(Path(folder))


def step_bytes(model: ModelConfig, num_sequences: int) -> int:
    """Read and written by a step of decodes."""
    of_sequences = CONTEXT * kv_bytes_of_a_token(model) + 2 * state_bytes_of_a_sequence(model)
    return model_size(model).weights_bytes() + num_sequences * of_sequences


def dense_like(base: ModelConfig, num_sequences: int) -> ModelConfig:
    """The dense base whose steps of decodes read as many bytes."""
    dense = DENSE | {"hidden_size": base.hidden_size}
    narrow, wide = (step_bytes(model_of(dense | {"intermediate_size": width}), num_sequences) for width in (64, 128))
    num_64 = round((step_bytes(base, num_sequences) - narrow) / (wide - narrow))
    return model_of(dense | {"intermediate_size": 64 + 64 * num_64})


@dataclass(frozen=True)
class Side:
    runner: Runner
    plans: Mapping[str, StepPlan]

    def step_s(self, name: str) -> float:
        """The mean of three steps."""
        started = time.perf_counter()
        for _ in range(3):
            self.runner.run(self.plans[name])
        return (time.perf_counter() - started) / 3


def side_of(model: ModelConfig, num_threads: int) -> Side:
    sharding, kernels = ModelSharding(model), choose_kernels(CPU, DTYPE, num_threads)
    decoder = load_decoder(sharding, RandomWeights(), kernels)
    geometry = plan_pool(sharding, BLOCK_SIZE, DTYPE, POOL_BYTES)
    rotary = rotary_tables(model.rotaries, model.layer_sizes.head_dims, model.max_model_len, CPU)
    layout, pool = sharding.layout(BLOCK_SIZE, "bfloat16"), make_pool(geometry, CPU)
    runner = Runner(decoder, kernels, Alone(), pool, geometry, layout, rotary, geometry.num_pages)
    num_kv, num_state = CONTEXT // BLOCK_SIZE + 1, geometry.state.num_pages

    def sequence(number: int, tokens: Sequence[int], num_cached: int) -> SequencePlan:
        first = number * (num_kv + num_state)
        pages = packed(range(first, first + num_kv))
        state = packed(range(first + num_kv, first + num_kv + num_state))
        plan = StatePlan(state if num_cached else b"", state) if num_state else None
        return SequencePlan(number, tuple(tokens), num_cached, pages, None, SAMPLE, state=plan)

    decodes = {f"decode_{count}": [sequence(each, (each,), CONTEXT) for each in range(count)] for count in DECODES}
    prompt = {"prompt": [sequence(0, range(CONTEXT), 0)]}
    return Side(runner, {name: StepPlan(0, tuple(steps), (), ()) for name, steps in (decodes | prompt).items()})


def steps_over_dense(kind: str, num_threads: int = 2, num_rounds: int = 11) -> dict[str, float]:
    """Time of each step over that of the dense base, the median of rounds in which both take turns.

    `kind`: in `BASES`. The steps: decodes of one sequence and of eight, and a prompt, all of `CONTEXT` tokens.
    """
    torch.set_num_threads(1)
    base = model_of(BASES[kind])
    sides = [side_of(model, num_threads) for model in (base, dense_like(base, 1))]
    ratios: dict[str, list[float]] = {name: [] for name in sides[0].plans}
    for turn in range(num_rounds + 1):
        for name, kept in ratios.items():
            took_s = [side.step_s(name) for side in sides]
            if turn > 0:  # the first warms up
                kept.append(took_s[0] / took_s[1])
    return {name: statistics.median(each) for name, each in ratios.items()}
