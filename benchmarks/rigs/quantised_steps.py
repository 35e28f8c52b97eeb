"""Decode steps of one base with weights of bfloat16, of int8, FP8 and four bits, in turns in one process.

A base of eight of TinyLlama-1.1B's layers with random weights that never lie in a file: 352 million in the layers'
linears, which no cache holds, and 25 in the head, which stays in bfloat16. And one of two of gpt-oss-20b's layers, with
1.59 billion weights in 64 experts, as published in MXFP4 or in bfloat16.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from motet.kernels.backend import Kernels, choose_kernels, with_quantised_weights
from motet.kernels.quantised import Numbers, QuantisedWeight
from motet.workers.execution.runner import Runner
from motet.workers.memory.page_arrays import make_pool, plan_pool
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import Decoder, load_decoder
from motet.workers.models.layers import Attention, ExpertMlp, GatedMlp
from motet.workers.models.rotary import rotary_tables
from motet.workers.models.sharding import ModelSharding
from motet.workers.parallel import Alone
from motet.workers.plan import SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.wire.messages import SamplingParams

CPU, DTYPE, GROUP = torch.device("cpu"), torch.bfloat16, 128
BLOCK_SIZE, CONTEXT, POOL_BYTES = 16, 60, 64 << 20
SAMPLE = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NUMBERS: dict[str, Numbers] = {"int4": "uint4", "fp8": "float8", "mxfp4": "float4"}
MIXTURE = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 12_000,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


class RandomWeights:
    """A `WeightSource` of random numbers.

    `numbers`: of the linears of layers, of which those of experts alone are "float4", in MXFP4; None: all are bfloat16.
    """

    has_head = True

    def __init__(self, numbers: Numbers | None = None) -> None:
        self._numbers = numbers
        self._generator = torch.Generator().manual_seed(0)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: object = None,
        columns: object = None,
        *,
        in_floats: bool = False,
    ) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=DTYPE)
        return torch.empty(shape, dtype=DTYPE).normal_(std=shape[1] ** -0.5, generator=self._generator)

    def take_quantised(
        self, name: str, shape: tuple[int, ...], rows: object = None, columns: object = None
    ) -> QuantisedWeight | None:
        if self._numbers is None or (self._numbers == "float4" and "experts" not in name):
            return None
        scales = torch.full((shape[0], shape[1] // GROUP), 0.2 * shape[1] ** -0.5)
        if self._numbers == "float8":
            wide = torch.empty(shape).normal_(generator=self._generator)
            return QuantisedWeight(wide.to(torch.float8_e4m3fn), "float8", scales, None, GROUP)
        codes = torch.randint(0, 16, shape, generator=self._generator, dtype=torch.uint8)
        if self._numbers == "float4":
            exponents = torch.randint(-9, -6, (shape[0], shape[1] // 32), generator=self._generator)
            return QuantisedWeight(codes, "float4", exponents.float().exp2(), None, 32)
        zeros = torch.randint(5, 11, scales.shape, generator=self._generator)
        return QuantisedWeight(codes, "uint4", scales, zeros.float(), GROUP)

    def __contains__(self, name: str) -> bool:
        return False

    def has_other_head(self) -> bool:
        return False

    def drop(self, *, prefix: str = "", suffix: str = "") -> None: ...

    def split(self, name: str, num_rows: Mapping[str, int]) -> None: ...

    def finish(self) -> None: ...


def weight_bytes(decoder: Decoder) -> int:
    """Memory of the layers' linears; of a mixture that of its experts."""
    weights: list[Any] = []
    for layer in decoder.layers:
        assert isinstance(layer.attention, Attention)
        if isinstance(layer.mlp, ExpertMlp):
            weights += [layer.mlp.gate_up, layer.mlp.down]
            continue
        assert isinstance(layer.mlp, GatedMlp)
        linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        weights += [linear.weight for linear in linears]
    parts = [getattr(weight, name, None) for weight in weights for name in ("panels", "scales", "zeros")]
    return sum(part.nbytes for part in parts if part is not None)


class Bench:
    """`kinds`: beside bfloat16, of "int8" and those of `NUMBERS`."""

    def __init__(self, num_threads: int, config: Mapping[str, Any], kinds: Sequence[str]) -> None:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self._model = ModelConfig.from_folder(Path(folder))
        native = choose_kernels(CPU, DTYPE, num_threads)
        kernels = {"bfloat16": native}
        for kind in kinds:
            kernels[kind] = with_quantised_weights(native, DTYPE, num_threads, rounds=kind == "int8")
        self.bytes: dict[str, int] = {}
        self._runners = {kind: self._runner(kind, own) for kind, own in kernels.items()}

    def _runner(self, kind: str, kernels: Kernels) -> Runner:
        model, sharding = self._model, ModelSharding(self._model)
        decoder = load_decoder(sharding, RandomWeights(NUMBERS.get(kind)), kernels)
        self.bytes[kind] = weight_bytes(decoder)
        geometry = plan_pool(sharding, BLOCK_SIZE, DTYPE, POOL_BYTES)
        rotary = rotary_tables(model.rotaries, model.layer_sizes.head_dims, model.max_model_len, CPU)
        layout, pool = sharding.layout(BLOCK_SIZE, "bfloat16"), make_pool(geometry, CPU)
        return Runner(decoder, kernels, Alone(), pool, geometry, layout, rotary, geometry.num_pages)

    def speeds(self, num_sequences: int, num_rounds: int) -> dict[str, float]:
        """Decodes per second of each kind over those of bfloat16, the median of rounds in which all take turns."""
        pages = -(-(CONTEXT + 1) // BLOCK_SIZE)
        sequences = tuple(
            SequencePlan(i, (i,), CONTEXT, packed(tuple(range(i * pages, (i + 1) * pages))), None, SAMPLE)
            for i in range(num_sequences)
        )
        plan, ratios = StepPlan(0, sequences, (), ()), {kind: list[float]() for kind in self._runners}
        for turn in range(num_rounds + 1):
            took_s = {}
            for kind, runner in self._runners.items():
                started = time.perf_counter()
                for _ in range(2):
                    runner.run(plan)
                took_s[kind] = time.perf_counter() - started
            for kind, each in took_s.items():
                if turn > 0:  # the first warms up
                    ratios[kind].append(took_s["bfloat16"] / each)
        return {kind: statistics.median(each) for kind, each in ratios.items() if kind != "bfloat16"}


def measure(num_threads: int = 2, num_rounds: int = 9) -> dict[str, float]:
    """By kind and sequences of a step, decodes per second over those of bfloat16; and gibibytes of weights."""
    figures = dict[str, float]()
    for config, prefix, kinds in ((CONFIG, "", ("int8", "int4", "fp8")), (MIXTURE, "experts_", ("mxfp4",))):
        bench = Bench(num_threads, config, kinds)
        for num_sequences, name in ((1, "one"), (8, "8"), (64, "64")):
            for kind, ratio in bench.speeds(num_sequences, num_rounds).items():
                figures[f"{prefix}{kind}_{name}"] = round(ratio, 2)
        figures |= {f"{prefix}{kind}_gib": round(size / (1 << 30), 3) for kind, size in bench.bytes.items()}
    return figures
