"""Decode steps of a hybrid, whose layers have mostly a recurrent state, and of a dense base that reads as many bytes.

Both have random weights in bfloat16. The hybrid has the layers of Qwen3.5-0.8B, 16 of them; the dense base as many of
Qwen3's, whose MLP is as wide as it takes. What a step reads: all weights, and of each sequence its KV, or its KV and
its state, which is written too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
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
HYBRID = SHARED | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "intermediate_size": 3584,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
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


def dense_like(hybrid: ModelConfig, num_sequences: int) -> ModelConfig:
    """The dense base whose steps read as many bytes."""
    wanted = step_bytes(hybrid, num_sequences)
    narrow, wide = (model_of(DENSE | {"intermediate_size": width}) for width in (64, 128))
    of_64 = step_bytes(wide, num_sequences) - step_bytes(narrow, num_sequences)
    return model_of(
        DENSE | {"intermediate_size": 64 + 64 * round((wanted - step_bytes(narrow, num_sequences)) / of_64)}
    )


@dataclass(frozen=True)
class Side:
    runner: Runner
    plan: StepPlan

    def step_s(self) -> float:
        started = time.perf_counter()
        for _ in range(3):
            self.runner.run(self.plan)
        return time.perf_counter() - started


def side_of(model: ModelConfig, num_sequences: int, num_threads: int) -> Side:
    sharding, kernels = ModelSharding(model), choose_kernels(CPU, DTYPE, num_threads)
    decoder = load_decoder(sharding, RandomWeights(is_narrow=False), kernels)
    geometry = plan_pool(sharding, BLOCK_SIZE, DTYPE, POOL_BYTES)
    rotary = rotary_tables(model.rotaries, model.layer_sizes.head_dims, model.max_model_len, CPU)
    layout, pool = sharding.layout(BLOCK_SIZE, "bfloat16"), make_pool(geometry, CPU)
    runner = Runner(decoder, kernels, Alone(), pool, geometry, layout, rotary, geometry.num_pages)
    num_kv, num_state = CONTEXT // BLOCK_SIZE + 1, geometry.state.num_pages
    sequences = []
    for number in range(num_sequences):
        first = number * (num_kv + num_state)
        pages = packed(range(first, first + num_kv))
        state = packed(range(first + num_kv, first + num_kv + num_state))
        plan = StatePlan(state, state) if num_state else None
        sequences.append(SequencePlan(number, (number,), CONTEXT, pages, None, SAMPLE, state=plan))
    return Side(runner, StepPlan(0, tuple(sequences), (), ()))


def hybrid_over_dense(num_sequences: int, num_threads: int = 2, num_rounds: int = 11) -> float:
    """Time of the hybrid's step over that of the dense base, the median of rounds in which both take turns."""
    torch.set_num_threads(1)
    hybrid = model_of(HYBRID)
    sides = [side_of(model, num_sequences, num_threads) for model in (hybrid, dense_like(hybrid, num_sequences))]
    ratios = []
    for turn in range(num_rounds + 1):
        took_s = [side.step_s() for side in sides]
        if turn > 0:  # the first warms up
            ratios.append(took_s[0] / took_s[1])
    return statistics.median(ratios)
