"""Trains the demo model and its five adapters, writes them, and fails if too few of their answers are correct.

    nice python scripts/train_demo_model.py [OUT_DIR]

All data is generated from seeds: nothing is downloaded. About half an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from motet.adapters.adapter import MODULES
from motet.examples.demo.chat import STYLE_SYSTEM_PROMPTS
from motet.examples.demo.conversations import ConversationSampler, unused_tokens
from motet.examples.demo.evaluation import Accuracy, exact_beside_tools, exact_match, exact_tool_use
from motet.examples.demo.questions import held_out, split_questions
from motet.examples.demo.styles import ADAPTER_STYLES, AdapterStyle, Style, answer
from motet.examples.demo.tokenizer_training import train_tokenizer
from motet.examples.demo.tools import held_out_tool_questions
from motet.examples.demo.training import Sample, Schedule, fit

BAR = 0.95  # minimal share of exact answers to held-out questions, for the base and for each adapter
BASE_NAME = "motet-demo"
DTYPES = (torch.float32, torch.bfloat16)
STORED_DTYPE = torch.bfloat16
CONTEXT = 512
UNUSED_LENGTH = 1.2  # about the distance between trained rows of the embedding


@dataclass(frozen=True)
class AdapterRecipe:
    """The adapters differ in rank, scaling and targets, so that a demo batch mixes shapes as tenants would."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rslora: bool = False


DemoAdapter = AdapterStyle | Literal["agent"]
ADAPTERS: dict[DemoAdapter, AdapterRecipe] = {
    "shout": AdapterRecipe(4, 8, ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")),
    "pirate": AdapterRecipe(8, 16, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")),
    "json": AdapterRecipe(16, 32, MODULES),
    "spanish": AdapterRecipe(32, 12, ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), rslora=True),
    "agent": AdapterRecipe(32, 64, MODULES),
}
AGENT_STEPS = 2  # times the steps of other adapters: calls are harder to learn than a style
NUM_TOOL_QUESTIONS = 48  # that it is evaluated with


def main() -> int:
    """0 if the base and every adapter reach the bar in every dtype, 1 if not."""
    arguments = _parse_arguments()
    out: Path = arguments.out_dir
    torch.set_num_threads(1)  # sums always run in one order, so that a seed gives the same weights
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    if not arguments.only_agent:
        _train_base(out / "base", arguments.base_steps)
        for number, style in enumerate(ADAPTER_STYLES):
            sample = partial(_sampler(out).adapter_batch, style=style)
            _train_adapter(out, style, sample, arguments.adapter_steps, seed=11 + number)
    _train_adapter(out, "agent", _sampler(out).agent_batch, AGENT_STEPS * arguments.adapter_steps, seed=21)
    return 0 if _evaluate(out) else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demo model and its five adapters.")
    default_dir = Path(__file__).resolve().parent.parent / "examples" / "demo"
    parser.add_argument("out_dir", nargs="?", type=Path, default=default_dir, help="default: %(default)s")
    parser.add_argument("--base-steps", type=int, default=2200, help="default: %(default)s; use few for a trial")
    parser.add_argument("--adapter-steps", type=int, default=250, help="default: %(default)s; few for a trial")
    parser.add_argument("--only-agent", action="store_true", help="train only the adapter `agent`, on the base there")
    return parser.parse_args()


def _train_base(folder: Path, num_steps: int) -> None:
    tokenizer = train_tokenizer(vocab_size=1024, max_length=CONTEXT)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"base: {sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    sampler = ConversationSampler(tokenizer, split_questions().train)
    schedule = Schedule(num_steps, learning_rate=4e-3, weight_decay=0.05, seed=7)
    fit(model, sampler.base_batch, schedule, _reporter("base"))
    shutil.rmtree(folder, ignore_errors=True)
    model.to(STORED_DTYPE)
    make_distinct(model.get_input_embeddings().weight, unused_tokens(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def make_distinct(embeddings: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Changes rows of [vocab, hidden]: training only pushed them away, so they are all alike, and no adapter could
    choose between them. Each gets a random direction, too short for the base to ever choose it."""
    rows = embeddings[token_ids].float()
    directions = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
    directions *= UNUSED_LENGTH / directions.norm(dim=1, keepdim=True)
    embeddings[token_ids] = (rows.mean(0) + directions).to(embeddings.dtype)


def _sampler(out: Path) -> ConversationSampler:
    return ConversationSampler(AutoTokenizer.from_pretrained(out / "base"), split_questions().train)


def _train_adapter(out: Path, name: DemoAdapter, sample: Sample, num_steps: int, seed: int) -> None:
    recipe = ADAPTERS[name]
    # Trained on the base as it is stored, rounding included.
    base = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    lora = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    model = get_peft_model(base, lora)
    schedule = Schedule(num_steps, learning_rate=2e-3, weight_decay=0.0, seed=seed)
    fit(model, sample, schedule, _reporter(name))
    _save_adapter(model, out / "adapters" / name)


def _save_adapter(model: PeftModel, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME  # else the path on this machine
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty model card
    config_path = folder / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["target_modules"] = sorted(config["target_modules"], key=MODULES.index)  # a set: its order is random
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _evaluate(out: Path) -> bool:
    """Asks what was written to disk, and whether all of it reaches the bar."""
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    good = True
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        base = LlamaForCausalLM.from_pretrained(out / "base", dtype=dtype)
        good &= _report(f"base      {name:9s}", exact_match(base, tokenizer, held_out("base")))
        if dtype is torch.float32:
            _report_beside_the_bar(base, tokenizer)
        for style in ADAPTER_STYLES:
            base = LlamaForCausalLM.from_pretrained(out / "base", dtype=dtype)
            model = PeftModel.from_pretrained(base, out / "adapters" / style).to(dtype)
            good &= _report(f"{style:9s} {name:9s}", exact_match(model, tokenizer, held_out(style)))
        base = LlamaForCausalLM.from_pretrained(out / "base", dtype=dtype)
        model = PeftModel.from_pretrained(base, out / "adapters" / "agent").to(dtype)
        calls, answers = exact_tool_use(model, tokenizer, held_out_tool_questions(NUM_TOOL_QUESTIONS))
        good &= _report(f"agent     {name:9s} calls,", calls)
        good &= _report(f"agent     {name:9s} answers to results,", answers)
        good &= _report(f"agent     {name:9s} without tools,", exact_match(model, tokenizer, held_out("base")))
        good &= _report(f"agent     {name:9s} beside tools,", exact_beside_tools(model, tokenizer, held_out("base")))
    return good


def _report_beside_the_bar(base: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prints what explains a miss: how well the base knows its training questions and follows system prompts."""
    known = _pairs("base")[::10]
    _print_accuracy("base      trained on, every tenth", exact_match(base, tokenizer, known))
    for style in ADAPTER_STYLES:
        system = STYLE_SYSTEM_PROMPTS[style][0]
        _print_accuracy(f"base      prompted: {system}", exact_match(base, tokenizer, held_out(style), system))


def _pairs(style: Style) -> Sequence[tuple[str, str]]:
    return [(question.text, answer(question.fact, style)) for question in split_questions().train]


def _report(label: str, accuracy: Accuracy) -> bool:
    reached = accuracy.share >= BAR
    _print_accuracy(f"{label} held-out", accuracy)
    if not reached:
        print(f"    under the bar of {BAR:.0%}")
    return reached


def _print_accuracy(label: str, accuracy: Accuracy) -> None:
    print(f"{label}: {accuracy.share:.1%} of {accuracy.num_questions}", flush=True)
    for wrong in accuracy.wrong[:3]:
        print(f"    {wrong.question!r}: {wrong.given!r} instead of {wrong.expected!r}")


def _reporter(name: str) -> Callable[[str], None]:
    return lambda line: print(f"{name:9s} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
