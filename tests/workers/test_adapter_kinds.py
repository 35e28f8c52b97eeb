"""Adapters that scale and shift outputs (DoRA, IA3, biases), and products of matrices (VeRA, LoHa, LoKr), against PEFT.

They are in one batch with plain LoRA and the base.
"""

from __future__ import annotations

import json
import random
import warnings
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from motet.adapters.adapter import OUTER, OUTPUTS
from motet.adapters.errors import AdapterCorrupt
from motet.adapters.format.output_vectors import has_outputs
from motet.adapters.format.targets import module_keys
from motet.adapters.packing.packing import pack
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import VARIANTS, VOCAB_SIZE, WRAPPED, write_model
from motet.tests.rigs.peft_case import SAMPLING, TOLERANCE, PeftCase, logprobs_of
from motet.workers.execution.executor import LocalExecutor
from motet.workers.models.config import ModelConfig
from motet.workers.models.stored_tensor import base_tensors

pytestmark = pytest.mark.slow
_ATTENTION, _MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
_FUSED = {"phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"])}
# Biases in all linears, some, and none; linears that are one in the file; heads in another order; layers with a
# recurrent state, of other sizes, with values that are made of keys, with experts; q with a gate.
BASES = ("llama", "llama_bias", "qwen2", "phi3", "glm4", "qwen3_5", "gemma4_dense", "qwen2_moe", "cohere2")


def _configs(base: str, has_biases: bool) -> dict[str, PeftConfig]:
    attention, mlp = _FUSED.get(base, (_ATTENTION, _MLP))
    mlp = [f"shared_expert.{name}" for name in mlp] if base == "qwen2_moe" else mlp
    linears = [*attention, *mlp]
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6}
    configs: dict[str, PeftConfig] = {
        "plain": LoraConfig(**common, target_modules=linears),
        "dora": LoraConfig(**common, use_dora=True, target_modules=linears),
        "dora_of_some": LoraConfig(
            **{**common, "r": 3},
            use_dora=True,
            use_rslora=True,
            target_modules=attention[-1:] + mlp[-1:],
            layers_to_transform=[0, 2],
            rank_pattern={attention[-1]: 5},
        ),
        "lora_bias": LoraConfig(**common, lora_bias=True, target_modules=linears),
        "ia3": IA3Config(
            task_type="CAUSAL_LM",
            target_modules=[*attention[:3], *mlp[-1:], *mlp[:1]],
            feedforward_modules=mlp[-1:],
        ),
    }
    lycoris: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 3, "alpha": 5, "target_modules": linears}
    configs |= {
        "vera": VeraConfig(task_type="CAUSAL_LM", r=24, target_modules=linears),
        "loha": LoHaConfig(**lycoris, rank_pattern={attention[-1]: 2}, layers_to_transform=[0, 2]),
        "loha_wide": LoHaConfig(**{**lycoris, "r": 18, "target_modules": attention[:1]}),  # of rank 324
        "lokr": LoKrConfig(**lycoris),
        "lokr_both": LoKrConfig(**lycoris, decompose_both=True, alpha_pattern={attention[0]: 2}),
        "lokr_whole": LoKrConfig(**{**lycoris, "r": 40, "target_modules": linears[-1:]}, decompose_factor=4),
    }
    if has_biases:
        configs |= {
            "bias_all": LoraConfig(**common, bias="all", target_modules=attention[:1]),
            "dora_bias": LoraConfig(**common, bias="lora_only", use_dora=True, target_modules=attention),
        }
    return configs


def _draw(model: PeftModel, generator: torch.Generator) -> None:
    """Far from where training begins."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name or "ia3_l" in name:
            parameter.data *= 1 + 0.3 * noise
        elif "lora_A" in name:
            parameter.data = noise * parameter.shape[1] ** -0.5
        elif "lora_B" in name:
            parameter.data = 0.15 * noise
        elif "vera_lambda" in name or "lokr_w" in name or "hada_w" in name:
            parameter.data = 0.4 * noise
        elif name.endswith(".bias") and parameter.requires_grad:
            parameter.data += 0.3 * noise


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PeftCase:
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    has_biases = any(name.endswith("q_proj.bias") for name, _ in base.named_parameters())
    models, folders = {}, {}
    for seed, (name, config) in enumerate(_configs(request.param, has_biases).items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT says that biases change the base's answers
            models[name] = get_peft_model(deepcopy(base), config).eval()
            _draw(models[name], torch.Generator().manual_seed(seed))
            folders[name] = folder / name
            models[name].save_pretrained(folders[name])
    return PeftCase(base, models, folders, Stock.make(model_path, folders, folder / "store"), ("dora", "ia3", "plain"))


def test_mixed_batch(case: PeftCase) -> None:
    """In chunks, and on a pool in which adapters evict one another; also in nano-batches."""
    for name in case.models:
        apart = (case.logprobs([3, 1, 4], name) - case.logprobs([3, 1, 4], None)).abs().max()
        assert apart > 100 * TOLERANCE, f"{name} makes no difference to compare"
    num_pages = 24 + max(case.stock.num_pages(30, name) for name in case.models)
    for settings in ({"num_pages": 600}, {"num_pages": num_pages, "max_tokens_per_step": 13}):
        with case.stock.engine(**settings) as rig:
            case.check(rig)
    with case.stock.engine(num_pages=600) as rig:
        assert isinstance(rig.engine.executor, LocalExecutor)
        rig.engine.executor.runner.nano_batches = {num_rows: 1 + num_rows // 3 for num_rows in range(2, 200)}
        case.check(rig)


def test_bfloat16(case: PeftCase, tmp_path: Path) -> None:
    """The first token's log-probabilities are as near those of PEFT in float32 as plain LoRA's, within a factor."""
    stock = Stock.make(case.stock.model_path, case.folders, tmp_path / "store", dtype="bfloat16")
    apart: dict[str, list[float]] = {name: [] for name in case.models}
    generator = random.Random(3)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(4)]
    with stock.engine(num_pages=600) as rig:
        for index, (prompt, name) in enumerate((prompt, name) for prompt in prompts for name in case.models):
            rig.submit(index, prompt, name, SAMPLING)
        rig.finish()
        for index, (prompt, name) in enumerate((prompt, name) for prompt in prompts for name in case.models):
            difference = logprobs_of(rig.outputs[index])[0] - case.logprobs(prompt, name)[-1]
            apart[name].append(float(difference.abs().mean()))
    for name, differences in apart.items():
        assert median(differences) < 4 * median(apart["plain"]), (name, apart)


@pytest.mark.parametrize("degree", [2, 4])
def test_gang(case: PeftCase, degree: int) -> None:
    with gang(case.stock.gang_config(num_pages=600, degree=degree)) as (engine, _):
        case.check(EngineRig(engine, case.stock.refs))


def test_what_is_packed_again_is_the_same(case: PeftCase) -> None:
    """Without the base: what it decides is in the store. A damaged vector is found."""
    store = AdapterStore(case.stock.store_path)
    for name in case.models:
        ref = case.stock.refs[name]
        content = store.load_content(ref.digest)
        assert content.module_ranks == ref.module_ranks
        assert (pack(content, case.stock.layout) == store.load_packed(ref.digest, case.stock.layout)).all()
        if not content.outputs:
            continue
        path = store.root / ref.digest[:2] / ref.digest / "adapter_model.safetensors"
        whole = bytearray(path.read_bytes())
        damaged = whole.copy()
        damaged[_start_of_vector(whole)] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(AdapterCorrupt, match="checksum"):
            store.load_content(ref.digest)
        path.write_bytes(whole)


@pytest.mark.parametrize("family", [*VARIANTS, *WRAPPED])
def test_the_linears_of_each_family_are_found_in_its_files(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path)
    shape = ModelConfig.from_folder(folder).shape
    stored = base_tensors(folder, shape)
    for (layer, module), path in {key: name for name, key in module_keys(shape, "model.").items()}.items():
        if layer != OUTER and has_outputs(shape, layer, module):
            num_in, num_out = shape.sides(layer, module) or (0, 0)
            assert stored[f"{path}.weight"].shape == (num_out, num_in)


def _start_of_vector(file: bytes | bytearray) -> int:
    header_bytes = int.from_bytes(file[:8], "little")
    header: dict[str, dict[str, list[int]]] = json.loads(file[8 : 8 + header_bytes])
    return 8 + header_bytes + next(at["data_offsets"][0] for name, at in header.items() if OUTPUTS in name)
