"""transformers + PEFT on the same shape and adapters as the engine: what a step of mixed-batch generation takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from motet.benchmarks.gpu.engine_bench import DRY_SIZE, FULL_SIZE, RANK
from motet.benchmarks.gpu.machine import Machine, Row

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = 64  # tokens: shorter than the engine's, to the baseline's advantage
TOKENS = 4  # whose steps are timed, after the first


@torch.inference_mode()
def time_peft(machine: Machine) -> Iterator[Row]:
    """The base alone, and all adapters in one batch. Nothing where transformers or PEFT is not installed."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError as problem:
        print(f"transformers + PEFT is left out: {problem}")
        return
    size = DRY_SIZE if machine.is_dry else FULL_SIZE
    shape = {key: value for key, value in size.config.items() if key not in ("architectures", "rope_theta")}
    config = LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": size.config["rope_theta"]})
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype, attn_implementation="sdpa")
        model = get_peft_model(model, _lora(LoraConfig), adapter_name="0")
        for index in range(1, max(size.adapters)):
            model.add_adapter(str(index), _lora(LoraConfig))
    model = model.to(machine.dtype).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.02)
    prompts = torch.randint(0, config.vocab_size - 1, (size.num_sequences, PROMPT), device=machine.device)
    for count in (0, max(size.adapters)):
        names = [str(index % count) if count else "__base__" for index in range(size.num_sequences)]
        first_s, all_s = (_generate_s(machine, model, prompts, names, num_tokens) for num_tokens in (1, 1 + TOKENS))
        what = f"B {size.num_sequences}, context {PROMPT}, {count} adapters"
        if machine.is_dry:
            yield Row("PEFT decode step", what)
        else:
            step_s = (all_s - first_s) / TOKENS
            yield Row("PEFT decode step", what, time_s=step_s, note=f"{size.num_sequences / step_s:.0f} tokens/s")


def _lora(make: type) -> object:
    return make(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def _generate_s(
    machine: Machine, model: torch.nn.Module, prompts: torch.Tensor, names: list[str], num_tokens: int
) -> float:
    """Seconds to generate this many tokens; the better of two times."""
    best = float("inf")
    for _ in range(1 if machine.is_dry else 2):
        if not machine.is_dry:
            torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(  # type: ignore[operator]
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            adapter_names=names,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        ).sum().item()
        best = min(best, time.perf_counter() - started)
    return best
