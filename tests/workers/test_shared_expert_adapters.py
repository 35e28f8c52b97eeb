"""Adapters of shared experts, dense layers and routers of mixtures against transformers with the matrices merged in.

PEFT drops those of some of these bases when it loads them, and computes without them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.validation import validate
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import VOCAB_SIZE, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.workers.engine_builder import build_engine
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding, layouts_of_gang
from motet.workers.wire.messages import AdapterRef, SamplingParams

BLOCK_SIZE = 8
NUM_TOKENS = 10
TOLERANCE = 1e-3  # of log-probabilities in float32; below it a choice is a close call, which rounding may decide
BASES = ("glm4_moe", "deepseek_v3", "qwen2_moe", "qwen3_5_moe", "llama4", "nemotron_h_moe", "hunyuan_moe")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj")
RECIPES: dict[str, dict[str, Any]] = {  # which modules, and the rest of the config
    "mlps": {"names": PROJECTIONS, "r": 3, "lora_alpha": 6},
    "gates": {"names": ("shared_expert_gate", "gate", "router", "wg"), "r": 2, "lora_alpha": 6, "use_rslora": True},
    "all": {
        "names": ("q_proj", "o_proj", *PROJECTIONS, "shared_expert_gate", "gate", "router"),
        **{"r": 4, "lora_alpha": 4, "rank_pattern": {"mlp.gate_proj": 6, "shared_expert_gate": 1}},
    },
    "one_layer": {"names": PROJECTIONS, "r": 5, "lora_alpha": 10, "layers_to_transform": [1]},
}
ADAPTERS = (None, *RECIPES, "all", None, "mlps")


def write_adapter(recipe: str, model: Any, folder: Path) -> Path:
    """An upload with random matrices for what a recipe names, which are added to the model's weights."""
    options = {**RECIPES[recipe]}
    if model.config.model_type == "nemotron_h" and "layers_to_transform" in options:
        options["layers_to_transform"] = [2]  # which has experts
    names, generator = options.pop("names"), torch.Generator().manual_seed(list(RECIPES).index(recipe))
    layers, patterns = (
        options.get("layers_to_transform", range(len(model.model.layers))),
        options.get("rank_pattern", {}),
    )
    tensors, targeted = dict[str, torch.Tensor](), set[str]()
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        is_named = path.rpartition(".")[2] in names and parameter.dim() == 2 and ".experts." not in name
        if not is_named or int(path.split(".")[2]) not in layers:
            continue
        targeted.add(path.rpartition(".")[2])
        rank = next((rank for end, rank in patterns.items() if path.endswith(f".{end}")), options["r"])
        num_out, num_in = parameter.shape
        a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
        b = torch.randn(num_out, rank, generator=generator) * 0.5
        parameter.data += options["lora_alpha"] / (rank**0.5 if options.get("use_rslora") else rank) * b @ a
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "target_modules": sorted(targeted), **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def content_of(path: Path, model: ModelConfig) -> AdapterContent:
    return validate((path / "adapter_config.json").read_bytes(), path / "adapter_model.safetensors", model.shape)


@dataclass(frozen=True)
class Case:
    model_path: Path
    store_path: Path
    refs: Mapping[str, AdapterRef]
    models: Mapping[str | None, Any]  # transformers', by adapter


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    model, store = ModelConfig.from_folder(model_path), AdapterStore(folder / "store")
    layouts = [ModelSharding(model).layout(BLOCK_SIZE, "float32")]
    layouts += layouts_of_gang(model, 2, BLOCK_SIZE, "float32")
    layouts += layouts_of_gang(model, 2, BLOCK_SIZE, "float32", "expert")
    refs, models = dict[str, AdapterRef](), dict[str | None, Any]()
    for recipe in (None, *RECIPES):
        models[recipe] = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        if recipe is not None:
            content = content_of(write_adapter(recipe, models[recipe], folder / recipe), model)
            store.put(content, layouts)
            refs[recipe] = AdapterRef(content.digest, content.module_ranks)
    return Case(model_path, folder / "store", refs, models)


def test_the_adapters_differ(case: Case) -> None:
    token_ids = torch.arange(9).unsqueeze(0)
    with torch.inference_mode():
        rows = torch.stack([model(input_ids=token_ids).logits[0, -1] for model in case.models.values()])
    apart = (rows[:, None] - rows[None]).abs().amax(dim=-1) + torch.eye(len(rows)) * 10
    assert apart.min() > 0.1, "the adapters make no difference to compare"


@pytest.mark.parametrize(("degree", "expert_sharding"), [(1, "tensor"), (2, "tensor"), (2, "expert")])
def test_mixed_batch(case: Case, degree: int, expert_sharding: Any) -> None:
    """Base and adapters in chunked batches, alone and in gangs that share the experts in either way."""
    sharding = ModelSharding(ModelConfig.from_folder(case.model_path), degree, 0, expert_sharding)
    layout = sharding.layout(BLOCK_SIZE, "float32")
    num_pages = 24 + max(layout.num_pages(ref.module_ranks) for ref in case.refs.values())
    config = engine_config(
        case.model_path,
        case.store_path,
        dtype="float32",
        pool_bytes=num_pages * sharding.config.num_layers * sharding.slab(BLOCK_SIZE) * 4,
        block_size=BLOCK_SIZE,
        max_tokens_per_step=24,
        tensor_parallel=degree,
        expert_sharding=expert_sharding,
    )
    if degree > 1:
        with gang(config) as (engine, _):
            _assert_exact(case, EngineRig(engine, case.refs))
        return
    with EngineRig(build_engine(config), case.refs) as rig:
        _assert_exact(case, rig)
    with EngineRig(build_engine(config), case.refs) as rig:  # kernel by kernel
        rig.engine.executor.runner._step = None  # type: ignore[attr-defined]
        _assert_exact(case, rig)


def _assert_exact(case: Case, rig: EngineRig) -> None:
    generator = random.Random(1)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))] for _ in ADAPTERS]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=0)
    for i, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
        rig.submit(i, prompt, adapter, sampling)
    rig.finish()
    rig.assert_idle()
    for i, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
        output = rig.outputs[i]
        assert (output.finish_reason, output.error) == ("length", None)
        token_ids = torch.tensor([prompt + output.token_ids[:-1]])
        with torch.inference_mode():
            logits = case.models[adapter](input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert (logprobs.amax(dim=-1) - chosen).max() < TOLERANCE, f"adapter {adapter}"
        said = torch.tensor([entry.chosen for entry in output.logprobs])
        torch.testing.assert_close(said, chosen, atol=TOLERANCE, rtol=0)


def test_few_outputs_do_not_narrow_the_tiles_of_all(tmp_path: Path) -> None:
    """GPUs read rows of all modules in runs of one width."""
    model = ModelConfig.from_folder(write_model("qwen2_moe", tmp_path / "model"))
    layout = ModelSharding(model).layout(BLOCK_SIZE, "float32")
    assert [layout.part(module).widths for module in ("shared_expert_gate", "router")] == [(64, 8), (64, 8)]
    assert (model.shape.modules["shared_expert_gate"][1], model.shape.modules["router"][1]) == (1, 6)
    assert layout.tile == 8 and "-router8-" in layout.key


def test_a_router_is_known_by_its_name_in_the_files_too(tmp_path: Path) -> None:
    """As PEFT saved it with transformers 4."""
    model_path = write_model("mixtral", tmp_path / "model")
    path = write_adapter("gates", AutoModelForCausalLM.from_pretrained(model_path), tmp_path / "a")
    stored = load_file(path / "adapter_model.safetensors")
    assert len(stored) == 6 and all(".mlp.gate." in name for name in stored)
    save_file(
        {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in stored.items()},
        path / "adapter_model.safetensors",
    )
    assert content_of(path, ModelConfig.from_folder(model_path)).module_ranks == {"router": 2}


def test_a_file_without_matrices_of_a_shared_expert_is_refused(case: Case, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(case.model_path)
    path = write_adapter("mlps", AutoModelForCausalLM.from_pretrained(case.model_path), tmp_path / "a")
    config = json.loads((path / "adapter_config.json").read_text()) | {"layers_to_transform": [0]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterInvalid, match=r"tensors that adapter_config\.json does not target"):
        content_of(path, model)
