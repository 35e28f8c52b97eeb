"""Adapters of experts against transformers with the same matrices merged into its weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.adapters.format.validation import validate
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import NUM_LAYERS, SHAPE, VOCAB_SIZE, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.workers.config import EngineConfig
from motet.workers.engine_builder import build_engine
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding, layouts_of_gang
from motet.workers.wire.messages import AdapterRef, SamplingParams

pytestmark = pytest.mark.slow
BLOCK_SIZE = 8
NUM_TOKENS = 12
TOLERANCE = 1e-3  # of log-probabilities in float32; below it a choice is a close call, which rounding may decide
HIDDEN, WIDTH = SHAPE["hidden_size"], 40
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SIDES = {"q_proj": (HIDDEN, None), GATE: (HIDDEN, WIDTH), UP: (HIDDEN, WIDTH), DOWN: (WIDTH, HIDDEN)}


@dataclass(frozen=True)
class Naming:
    """The names of a family's experts in checkpoints and in adapters."""

    num_experts: int
    block: str
    names: Mapping[str, str]
    sparse_layers: tuple[int, ...]


QWEN_NAMES = {GATE: GATE, UP: UP, DOWN: DOWN}
NAMINGS = {
    "mixtral": Naming(4, "block_sparse_moe", {GATE: "w1", UP: "w3", DOWN: "w2"}, (0, 1, 2)),
    "qwen3_moe": Naming(6, "mlp", QWEN_NAMES, (0, 1, 2)),
}
# Modules, PEFT's options, and the rank of single experts.
RECIPES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all": (("q_proj", GATE, UP, DOWN), {"r": 3, "lora_alpha": 6}),
    "down_of_one_layer": ((DOWN,), {"r": 2, "lora_alpha": 8, "layers_to_transform": [1]}),
    "ranks_differ": ((GATE, DOWN), {"r": 4, "lora_alpha": 4, "use_rslora": True}),
    "attention_only": (("q_proj",), {"r": 5, "lora_alpha": 10}),
    "one_expert": ((GATE, UP, DOWN), {"r": 5, "lora_alpha": 10}),
}
ODD_EXPERT, ODD_RANK = 1, 7  # of "ranks_differ"
ONE_EXPERT = 2  # of "one_expert"
ADAPTERS = (None, *RECIPES, "all", None, "all")


def write_adapter(recipe: str, naming: Naming, num_query: int, folder: Path) -> Path:
    """An upload as transformers 4 and PEFT wrote it: one pair of matrices for each expert."""
    modules, options = RECIPES[recipe]
    called = [naming.names.get(module, module) for module in modules]
    if recipe == "one_expert":
        called = [f"experts.{ONE_EXPERT}.{name}" for name in called]
    config = {"peft_type": "LORA", "target_modules": called, **options}
    if recipe == "ranks_differ":
        config["rank_pattern"] = {f"experts.{ODD_EXPERT}.{naming.names[GATE]}": ODD_RANK}
    generator = torch.Generator().manual_seed(list(RECIPES).index(recipe))
    tensors = {}
    for layer in options.get("layers_to_transform", range(NUM_LAYERS)):
        for module in modules:
            num_in, num_out = SIDES[module][0], SIDES[module][1] or num_query
            for expert in range(naming.num_experts) if module != "q_proj" else (None,):
                if recipe == "one_expert" and expert != ONE_EXPERT:
                    continue
                odd = recipe == "ranks_differ" and (module, expert) == (GATE, ODD_EXPERT)
                rank = ODD_RANK if odd else options["r"]
                path = (
                    f"{naming.block}.experts.{expert}.{naming.names[module]}"
                    if expert is not None
                    else "self_attn.q_proj"
                )
                prefix = f"base_model.model.model.layers.{layer}.{path}.lora_"
                tensors[f"{prefix}A.weight"] = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
                tensors[f"{prefix}B.weight"] = torch.randn(num_out, rank, generator=generator) * 0.5
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model_path: Path, adapter: Path, naming: Naming) -> Any:
    """transformers' model with the adapter's products added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    module_of = {called: module for module, called in naming.names.items()}
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        scaling = config["lora_alpha"] / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0])
        parts = name.split(".")
        layer = model.model.layers[int(parts[4])]
        if parts[6] == "q_proj":
            layer.self_attn.q_proj.weight.data += scaling * b @ a
            continue
        expert, module = int(parts[7]), module_of[parts[8]]
        if module == DOWN:
            layer.mlp.experts.down_proj.data[expert] += scaling * b @ a
        else:
            half = slice(0, WIDTH) if module == GATE else slice(WIDTH, 2 * WIDTH)
            layer.mlp.experts.gate_up_proj.data[expert, half] += scaling * b @ a
    return model.eval()


@dataclass(frozen=True)
class Case:
    model_path: Path
    store_path: Path
    refs: dict[str, AdapterRef]
    models: dict[str | None, Any]  # transformers', by adapter

    def config(self, degree: int, expert_sharding: Any) -> EngineConfig:
        """A pool in which adapters evict one another."""
        sharding = ModelSharding(ModelConfig.from_folder(self.model_path), degree, 0, expert_sharding)
        layout = sharding.layout(BLOCK_SIZE, "float32")
        num_pages = 14 + max(layout.num_pages(ref.module_ranks) for ref in self.refs.values())
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


@pytest.fixture(scope="module", params=NAMINGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, naming = tmp_path_factory.mktemp(request.param), NAMINGS[request.param]
    model_path = write_model(request.param, folder / "model")
    model, store = ModelConfig.from_folder(model_path), AdapterStore(folder / "store")
    layouts = [ModelSharding(model).layout(BLOCK_SIZE, "float32")]
    layouts += layouts_of_gang(model, 2, BLOCK_SIZE, "float32")
    layouts += layouts_of_gang(model, 4, BLOCK_SIZE, "float32", "expert")
    refs: dict[str, AdapterRef] = {}
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    models: dict[str | None, Any] = {None: base}
    for recipe in RECIPES:
        path = write_adapter(recipe, naming, model.num_heads * model.head_dim, folder / recipe)
        config = (path / "adapter_config.json").read_bytes()
        content = validate(config, path / "adapter_model.safetensors", model.shape)
        store.put(content, layouts)
        refs[recipe] = AdapterRef(content.digest, content.module_ranks)
        models[recipe] = merged(model_path, path, naming)
    return Case(model_path, folder / "store", refs, models)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # peft leaves some to its targets
def test_merged_weights_are_what_peft_computes(case: Case) -> None:
    """PEFT gives the same result: it converts such an adapter to the fused weights of transformers 5."""
    base = AutoModelForCausalLM.from_pretrained(case.model_path, dtype=torch.float32)
    token_ids = torch.arange(9).unsqueeze(0)
    with torch.inference_mode():
        expected = PeftModel.from_pretrained(base, case.model_path.parent / "all").eval()(input_ids=token_ids).logits
        torch.testing.assert_close(case.models["all"](input_ids=token_ids).logits, expected, atol=1e-4, rtol=0)


def test_the_adapters_differ(case: Case) -> None:
    last = len(case.models["all"].model.layers[0].mlp.experts.down_proj) - 1
    assert case.refs["ranks_differ"].module_ranks == {
        f"experts.0,2-{last}.gate_proj": 4,
        f"experts.{ODD_EXPERT}.gate_proj": ODD_RANK,
        "experts.down_proj": 4,
    }
    assert case.refs["one_expert"].module_ranks == {f"experts.{ONE_EXPERT}.{name}": 5 for name in (GATE, UP, DOWN)}
    token_ids = torch.arange(9).unsqueeze(0)
    with torch.inference_mode():
        rows = torch.stack([model(input_ids=token_ids).logits[0, -1] for model in case.models.values()])
    apart = (rows[:, None] - rows[None]).abs().amax(dim=-1) + torch.eye(len(rows)) * 10
    assert apart.min() > 0.3, "the adapters make no difference to compare"
    assert list(case.refs["all"].module_ranks) == ["q_proj", *(f"experts.{name}" for name in (GATE, UP, DOWN))]


@pytest.mark.parametrize(("degree", "expert_sharding"), [(1, "tensor"), (2, "tensor"), (4, "expert")])
def test_mixed_batch(case: Case, degree: int, expert_sharding: str) -> None:
    """Base and adapters in chunked batches, alone and in gangs that share the experts in either way."""
    config = case.config(degree, expert_sharding)
    if degree == 1:
        with EngineRig(build_engine(config), case.refs) as rig:
            _assert_exact(case, rig)
    else:
        with gang(config) as (engine, _):
            _assert_exact(case, EngineRig(engine, case.refs))


def _assert_exact(case: Case, rig: EngineRig) -> None:
    generator = random.Random(1)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))] for _ in ADAPTERS]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=0)
    for i, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
        rig.submit(i, prompt, adapter, sampling)
    rig.finish()
    rig.assert_idle()
    assert rig.engine.load().counters.num_adapter_evictions > 0
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
