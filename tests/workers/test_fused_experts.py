"""LoRA on fused experts, as PEFT saves it with transformers 5, against PEFT's own model."""

from __future__ import annotations

import json
import random
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.peft import parse_config
from motet.adapters.format.validation import resolve_parameters, validate
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import VOCAB_SIZE, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.workers.config import EngineConfig
from motet.workers.engine_builder import build_engine
from motet.workers.memory.page_arrays import pool_of
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding, layouts_of_gang
from motet.workers.wire.messages import AdapterRef, SamplingParams

BLOCK_SIZE = 8
NUM_TOKENS = 10
TOLERANCE = 1e-3  # of log-probabilities in float32; below it a choice is a close call, which rounding may decide
ROUTER = "gate.weight"
BLOCKS = {  # where models have their experts, and the router's weight
    "gpt_oss": ("mlp.", "router.weight"),
    "llama4": ("feed_forward.", "router.weight"),
    "granitemoe": ("block_sparse_moe.", "router.weight"),
    "granite_hybrid_moe": ("block_sparse_moe.", "router.weight"),
    "nemotron_h_moe": ("mixer.", ROUTER),
    "hunyuan_moe": ("mlp.", "gate.wg.weight"),
}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = {"r": 3, "lora_alpha": 6, "target_parameters": [GATE_UP, DOWN]}
RECIPES: dict[str, dict[str, Any]] = {
    "both": {**BOTH, "target_modules": []},
    "down": {"r": 2, "lora_alpha": 5, "target_modules": [], "target_parameters": ["down_proj"]},
    "gate_up_and_attention": {
        "r": 4,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": [GATE_UP],
        "layers_to_transform": [0],  # of modules only
    },
    "patterns": {
        **BOTH,
        "target_modules": ["v_proj"],
        "rank_pattern": {"gate_up_proj": 5, r".*\.2\.mlp\.experts\.down_proj": 1},
        "alpha_pattern": {"experts.down_proj": 9},
    },
    "router": {"r": 3, "lora_alpha": 9, "target_modules": [], "target_parameters": [ROUTER]},
    "all_linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},  # what it means differs between bases
    # Both parameters in one layer, one in another.
    "layers_differ": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": [],
        "target_parameters": [DOWN, "model.layers.2.mlp.experts.gate_up_proj"],
    },
}
LEGACY = "legacy_names"  # PEFT turns names of transformers 4 into target_parameters of twice the rank
ADAPTERS = (None, *RECIPES, "both", None, "patterns")


def write_adapter(recipe: str, mixtral: bool, model_path: Path, folder: Path) -> Path:
    """A PEFT folder with random matrices, by PEFT's own `save_pretrained`."""
    if recipe == LEGACY:
        names = ["w1", "w2", "w3"] if mixtral else [f"experts.{name}_proj" for name in ("gate", "up", "down")]
        options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", *names]}
    else:
        options = RECIPES[recipe]
        block, router = BLOCKS.get(model_path.parent.name[:-1], ("mlp.", ROUTER))
        if block == "mixer.":  # experts without a gate; layer 0 has no attention, and PEFT refuses `out_proj`
            options = json.loads(json.dumps(options).replace("gate_up_proj", "up_proj").replace("[0]", "[1]"))
            options["exclude_modules"] = ["out_proj"]
        named = [name.replace(ROUTER, router).replace("mlp.", block) for name in options.get("target_parameters", ())]
        options = {**options, "target_parameters": named or None}
        if recipe == "all_linear" and block == "feed_forward.":
            # PEFT takes the router of Llama 4 for a linear, and cannot compute it.
            options["exclude_modules"] = ["router"]
        if "gemma4" in str(model_path):  # beside a dense MLP, and the router is a linear
            options = json.loads(json.dumps(options).replace("mlp.", "").replace(r"mlp\\\\.", ""))
            if recipe == "router":
                options = {**options, "target_parameters": None, "target_modules": ["router.proj"]}
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(len(recipe))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
        elif "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Case:
    model_path: Path
    store_path: Path
    refs: dict[str, AdapterRef]
    models: dict[str | None, Any]  # transformers' and PEFT's, by adapter

    def config(self, degree: int, expert_sharding: Any) -> EngineConfig:
        """A pool in which adapters evict one another."""
        sharding = ModelSharding(ModelConfig.from_folder(self.model_path), degree, 0, expert_sharding)
        layout = sharding.layout(BLOCK_SIZE, "float32")
        num_pages = 14 + max(layout.num_pages(ref.module_ranks) for ref in self.refs.values())
        num_pages += 3 * pool_of(sharding, BLOCK_SIZE, torch.float32, 1).state.num_pages
        return engine_config(
            self.model_path,
            self.store_path,
            dtype="float32",
            pool_bytes=num_pages * sharding.config.num_layers * sharding.slab(BLOCK_SIZE) * 4,
            block_size=BLOCK_SIZE,
            max_tokens_per_step=24,
            tensor_parallel=degree,
            expert_sharding=expert_sharding,
        )


@pytest.fixture(
    scope="module",
    params=[
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_5_moe", "qwen3_next", "glm4_moe", "minimax_m2"),
        *("gemma4_moe", "llama4", "granitemoe", "granite_hybrid_moe", "ernie4_5_moe", "deepseek_v3", "nemotron_h_moe"),
        "hunyuan_moe",
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    model, store = ModelConfig.from_folder(model_path), AdapterStore(folder / "store")
    layouts = [ModelSharding(model).layout(BLOCK_SIZE, "float32")]
    layouts += layouts_of_gang(model, 2, BLOCK_SIZE, "float32")
    layouts += layouts_of_gang(model, 2, BLOCK_SIZE, "float32", "expert")
    refs: dict[str, AdapterRef] = {}
    models: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()}
    # PEFT has no such conversion for Qwen2-MoE, whose shared expert has projections of the same names.
    for recipe in (*RECIPES, LEGACY) if request.param in ("mixtral", "qwen3_moe") else RECIPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # PEFT looks for patterns among modules only
            path = write_adapter(recipe, request.param == "mixtral", model_path, folder / recipe)
            base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            models[recipe] = PeftModel.from_pretrained(base, path).eval()
        content = validate((path / "adapter_config.json").read_bytes(), path / "adapter_model.safetensors", model.shape)
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
def test_mixed_batch(case: Case, degree: int, expert_sharding: str) -> None:
    """Base and adapters in chunked batches, alone and in gangs that share the experts in either way."""
    config = case.config(degree, expert_sharding)
    if degree == 1:
        with EngineRig(build_engine(config), case.refs) as rig:
            _assert_exact(case, rig, (*ADAPTERS, LEGACY) if LEGACY in case.refs else ADAPTERS)
    else:
        with gang(config) as (engine, _):
            _assert_exact(case, EngineRig(engine, case.refs), ADAPTERS)


def _assert_exact(case: Case, rig: EngineRig, adapters: tuple[str | None, ...]) -> None:
    generator = random.Random(1)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))] for _ in adapters]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=0)
    for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        rig.submit(i, prompt, adapter, sampling)
    rig.finish()
    rig.assert_idle()
    assert rig.engine.load().counters.num_adapter_evictions > 0
    for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
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


def test_a_missing_matrix_is_named_as_in_the_file(case: Case, tmp_path: Path) -> None:
    shape, path = ModelConfig.from_folder(case.model_path).shape, case.model_path.parent / "both"
    tensors = load_file(path / "adapter_model.safetensors")
    for name in tensors:
        save_file({other: each for other, each in tensors.items() if other != name}, tmp_path / "tensors")
        with pytest.raises(AdapterInvalid, match=f"lacks tensors.*: {re.escape(name)}$"):
            validate((path / "adapter_config.json").read_bytes(), tmp_path / "tensors", shape)


def test_experts_without_a_gate_one_by_one_are_those_of_all(tmp_path: Path) -> None:
    """As where each expert is a module; an adapter of some of them is one, too."""
    folder = tmp_path / "nemotron_h_moe0"
    shape = ModelConfig.from_folder(write_model("nemotron_h_moe", folder / "model")).shape
    path = write_adapter("both", False, folder / "model", folder / "both")
    fused = validate((path / "adapter_config.json").read_bytes(), path / "adapter_model.safetensors", shape)
    tensors = {
        f"base_model.model.model.layers.{layer}.mixer.{module}.lora_{letter}.weight": torch.from_numpy(each.copy())
        for (layer, module), lora in fused.matrices.items()
        for letter, each in (("A", lora.a), ("B", lora.b))
    }
    names = ["experts.up_proj", "experts.down_proj"]
    assert len(tensors) == 2 * 2 * 2 * 6 and list(fused.module_ranks) == names

    def content(tensors: dict[str, torch.Tensor], targets: list[str]) -> AdapterContent:
        save_file(tensors, tmp_path / "tensors")
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
        return validate(json.dumps(config).encode(), tmp_path / "tensors", shape)

    every = [f"experts.{expert}.{name}_proj" for expert in range(6) for name in ("up", "down")]
    assert content(tensors, every).digest == fused.digest
    some = {name: each for name, each in tensors.items() if ".experts.4.up_proj." in name}
    assert content(some, ["experts.4.up_proj"]).module_ranks == {"experts.4.up_proj": 3}
    with pytest.raises(AdapterInvalid, match=r"experts\.4\.gate_proj.*is not a LoRA matrix of this base"):
        content({name.replace("up_proj", "gate_proj"): each for name, each in some.items()}, ["experts.4.up_proj"])


def test_targets_of_gpt_oss(tmp_path: Path) -> None:
    """Its experts are parameters: lists name modules of experts in vain, and PEFT finds none of them."""
    model_path = write_model("gpt_oss", tmp_path / "model")
    shape = ModelConfig.from_folder(model_path).shape

    def validated(name: str, **options: Any) -> AdapterContent:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, **options)).save_pretrained(tmp_path / name)
        config = (tmp_path / name / "adapter_config.json").read_bytes()
        return validate(config, tmp_path / name / "adapter_model.safetensors", shape)

    attention = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2}
    assert validated("all", target_modules="all-linear").module_ranks == attention
    names = [*attention, "gate_proj", "up_proj", "down_proj", "gate_up_proj"]
    assert validated("listed", target_modules=names).module_ranks == attention
    of_some_layers = ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj", "2.mlp.experts.down_proj"]
    content = validated("both", target_modules=["q_proj"], target_parameters=of_some_layers)
    assert {(layer, module.rpartition(".")[2]) for layer, module in content.matrices if "experts" in module} == {
        *((1, name) for name in ("gate_proj", "up_proj", "down_proj")),
        (2, "down_proj"),
    }
    assert validated("router", target_parameters=["mlp.router.weight"]).module_ranks == {"router": 2}
    names = ["mlp.router.weight", "o_proj.weight"]
    ranks = validated("linear", target_modules=["q_proj"], target_parameters=names).module_ranks
    assert ranks == {"q_proj": 2, "o_proj": 2, "router": 2}
    with pytest.raises(AdapterInvalid, match=r"gate_up_proj.* mlp\.router\.weight and weights of linears"):
        resolve_parameters(parse_config(b'{"peft_type": "LORA", "r": 2, "target_parameters": ["gate.bias"]}'), shape)
