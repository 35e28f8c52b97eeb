"""The demo model and its adapters, all batched together in motet's engine, on questions they were not trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from motet.adapters.packing.layout import Dtype
from motet.examples.demo.chat import answered, chat_prompt, question_messages
from motet.examples.demo.questions import held_out
from motet.examples.demo.styles import ADAPTER_STYLES, Style
from motet.examples.demo.tools import TOOLS, held_out_tool_questions
from motet.tests.rigs.engine_rig import Stock
from motet.workers.wire.messages import SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
STYLES: tuple[Style, ...] = ("base", *ADAPTER_STYLES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_least_95_percent_of_held_out_questions_are_answered_in_style(dtype: Dtype, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    adapters: dict[str, Path] = {style: DEMO / "adapters" / style for style in ADAPTER_STYLES}
    stock = Stock.make(DEMO / "base", adapters, tmp_path / "store", block_size=16, dtype=dtype)
    sampling = SamplingParams(max_tokens=64, temperature=0)
    expected: dict[int, tuple[Style, str]] = {}
    # Every third question of each style, 320 in all; the training script asks all of them.
    with stock.engine(num_pages=3000) as rig:
        for style in STYLES:
            for question, answer in held_out(style)[::3]:
                text = chat_prompt(tokenizer, question_messages(question))
                prompt = tokenizer.encode(text, add_special_tokens=False)
                expected[len(expected)] = (style, answer)
                rig.submit(len(expected) - 1, prompt, None if style == "base" else style, sampling)
        rig.finish()
    right = dict.fromkeys(STYLES, 0)
    for i, (style, answer) in expected.items():
        right[style] += tokenizer.decode(rig.outputs[i].token_ids, skip_special_tokens=True) == answer
    shares = {style: num_right / len(held_out(style)[::3]) for style, num_right in right.items()}
    assert min(shares.values()) >= 0.95, shares


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_agent_calls_tools_and_answers_with_their_results(dtype: Dtype, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    stock = Stock.make(DEMO / "base", {"agent": DEMO / "adapters" / "agent"}, tmp_path / "store", dtype=dtype)
    sampling = SamplingParams(max_tokens=64, temperature=0)
    expected: list[str] = []
    with stock.engine(num_pages=1000) as rig:
        for question in held_out_tool_questions(24):
            for num_messages in (2, 4):  # up to the call, and up to the answer
                messages = question.messages()[:num_messages]
                prompt = tokenizer.encode(chat_prompt(tokenizer, messages[:-1], TOOLS), add_special_tokens=False)
                rig.submit(len(expected), prompt, "agent", sampling)
                expected.append(answered(tokenizer, messages, TOOLS))
        rig.finish()
    right = [tokenizer.decode(rig.outputs[i].token_ids) == answer for i, answer in enumerate(expected)]
    assert sum(right) >= 0.95 * len(right), right
