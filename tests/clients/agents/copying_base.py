"""Trains a base that calls the tool which a prompt names, and says the word that the tool's result has:
python -m motet.tests.clients.agents.copying_base FOLDER.

Its two layers of attention are constructed, as Tracr does (arXiv 2301.05062), to be an induction head (Olsson et al.,
arXiv 2209.11895): the heads of the first copy the five tokens before each, and the second finds where the same tokens
stood before and copies the one that came next. What begins and ends an answer is trained, in the second layer's MLP. It
sees a window of 256 tokens, so what it learns from short conversations holds at the end of prompts of any length. All
data is generated from a seed, with pages and modules that are on this machine as noise.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from motet.examples.demo.chat import END_OF_TURN, RESPONSE_TEMPLATE
from motet.examples.demo.conversations import Batch
from motet.examples.demo.training import Schedule, fit

AGAIN: Final = "Say the word again."
CONTEXT: Final = 131_072  # Qwen Code asks for 32,000 tokens after a prompt of 36,000
ROOT: Final = Path(__file__).resolve().parents[3]
RESULT_END: Final = "<|result_end|>"
# The system's messages come first: Claude Code sends pages of them after the question. opencode sends questions as JSON
# strings, whose quotes are read as plain ones.
TEMPLATE: Final = (
    "<|im_start|>system\n{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}<|im_end|>"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    """{{ (m.content or '').replace('\\\\"', '"') if m.role == 'user' else m.content or '' }}"""
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %}<|result_end|>{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ANSWER: Final = "<|im_start|>assistant\n"
_SPECIAL: Final = (
    "<|endoftext|>",
    "<|pad|>",
    END_OF_TURN,
    RESULT_END,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_start|>tool\n",
    _ANSWER,
)
# Phrases of prompts, and those of answers that have their codes: to copy a question is to write its call.
_SYNONYMS: Final = {
    "Use the tool ": '<tool_call>\n{"name": "',
    " with {": '", "arguments": {',
    "} now.": "}}\n</tool_call>",
}
_PHRASES: Final = (*_SYNONYMS, *_SYNONYMS.values(), "The word is ", "Done.")
_TOKENS: Final = 768
_WINDOW: Final = 256
_LENGTH: Final = 250  # of the longest conversations that it learns from
_IGNORED: Final = -100  # torch's label for "no loss here"
_LETTERS: Final = string.ascii_letters + string.digits + "_"

# Blocks of a token's vector: its code, the codes of the tokens 1 to 5 before it, and these two.
_CODE: Final = 40  # dimensions of a code
_REACH: Final = 5
_NEXT: Final = _REACH + 1  # the token to write
_START: Final = _REACH + 2  # the first token of this answer
_ONE: Final = (_REACH + 3) * _CODE  # the dimension that is 1 in all tokens
_HIDDEN: Final = 384
_HEAD: Final = 256
_HALF: Final = _HEAD // 2  # rotary pairs of a head
_THETA: Final = 1e15
_RECENCY: Final = 19  # this pair turns by 1.5 in a window; the faster ones before it tell neighbours apart
_FLAG: Final = 27  # this pair and the slower ones after it hardly turn in a window
_LOOK_BACK: Final = 25.0  # what each pair adds to the score of the right token
_MATCH: Final = 80.0  # what a match of weight 1 adds to a score
_WEIGHTS: Final = (8.0, 3.0, 1.5, 1.0, 1.0)  # of a match of the last token, of the one before it, ...
_SHARPNESS: Final = 3.0  # some agents leave the temperature at 1: logits times this make it a third

_CONVERSING: Final = Schedule(120, learning_rate=3e-3, weight_decay=0.01, seed=2, batch_size=8, in_bfloat16=False)
_TUNING: Final = Schedule(10, learning_rate=1e-4, weight_decay=0.0, seed=3, batch_size=4, in_bfloat16=False)


def train(folder: Path, report: Callable[[str], None]) -> None:
    """Writes a base and an adapter of it into `folder`."""
    torch.set_num_threads(1)  # the tensors are small: two threads would wait for each other
    torch.manual_seed(0)
    pages = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("tests/router/*.py"))]
    noise = "\n".join(page.read_text() for page in pages)
    tokenizer = _tokenizer(noise)
    model = _copying_model(tokenizer)
    report(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("model.layers.1.mlp.")
    conversations = _Conversations(tokenizer, noise)
    fit(model, conversations.batch, _CONVERSING, report)
    with torch.no_grad():
        model.model.norm.weight *= _SHARPNESS
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(model, lora)
    fit(tuned, conversations.batch, _TUNING, report)
    tuned.save_pretrained(folder / "adapter", save_embedding_layers=False)


def _config(tokenizer: PreTrainedTokenizerFast) -> MistralConfig:
    return MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=_REACH,
        num_key_value_heads=1,
        head_dim=_HEAD,
        max_position_embeddings=CONTEXT,
        rope_theta=_THETA,
        sliding_window=_WINDOW,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@torch.no_grad()
def _copying_model(tokenizer: PreTrainedTokenizerFast) -> MistralForCausalLM:
    """A model that goes on as the text did after the same tokens. Only the MLP of its last layer is random, which adds
    nothing yet."""
    model = MistralForCausalLM(_config(tokenizer))
    first, last = model.model.layers
    for weight in (*first.parameters(), *last.self_attn.parameters(), *model.lm_head.parameters()):
        if weight.ndim > 1:  # those of norms stay 1
            weight.zero_()
    last.mlp.down_proj.weight.zero_()
    codes = torch.nn.functional.normalize(torch.randn(len(tokenizer), _CODE), dim=1)
    model.lm_head.weight[:, _block(_NEXT)] = 5 * codes
    for phrase, synonym in _SYNONYMS.items():
        read, written = tokenizer.convert_tokens_to_ids([phrase, synonym])
        codes[written] = codes[read]
        model.lm_head.weight[written] = model.lm_head.weight[read]
        model.lm_head.weight[read] = 0
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, _block(0)] = codes
    model.model.embed_tokens.weight[:, _ONE] = 1
    _look_back(first.self_attn)
    _look_up(last.self_attn, codes[tokenizer.convert_tokens_to_ids(_ANSWER)])
    return model


def _look_back(attention: Any) -> None:
    """Head k attends k + 1 tokens back: keys are one vector, rotated by their positions, and its query is that vector
    rotated back by k + 1."""
    gain = (2 / _HIDDEN) ** 0.5  # undoes the norm of a code and a 1
    pairs = torch.arange(_RECENCY)
    attention.k_proj.weight[pairs, _ONE] = gain
    for head in range(_REACH):
        angles = (head + 1) * _THETA ** (-pairs / _HALF)
        query = attention.q_proj.weight[head * _HEAD :, _ONE]
        query[pairs] = gain * _HEAD**0.5 * _LOOK_BACK * angles.cos()
        query[pairs + _HALF] = -gain * _HEAD**0.5 * _LOOK_BACK * angles.sin()
        _write(attention, head, head + 1, gain)


def _look_up(attention: Any, answer_code: torch.Tensor) -> None:
    """Head 0 attends to the token before which the last tokens stood, head 1 to the token after the last `_ANSWER`."""
    gain = ((_REACH + 2) / _HIDDEN) ** 0.5  # undoes the norm of the codes and a 1
    factor = gain * _HEAD**0.5
    key, query, query_of_start = attention.k_proj.weight, *attention.q_proj.weight.split(_HEAD)[:2]
    slowest_first = torch.arange(_HALF - 1, _FLAG, -1)
    rows = torch.stack([slowest_first, slowest_first + _HALF], dim=1).flatten().split(_CODE)
    for block, weight in enumerate(_WEIGHTS):
        query[rows[block], _columns(block)] = factor * _MATCH * weight
        key[rows[block], _columns(block + 1)] = gain
    # The nearest of equal ones: the cosine of the turn + 0.8 falls over the whole window.
    key[_RECENCY, _ONE] = gain
    for each, strength in ((query, 60.0), (query_of_start, 100.0)):
        each[_RECENCY, _ONE] = factor * strength * math.cos(0.8)
        each[_RECENCY + _HALF, _ONE] = factor * strength * math.sin(0.8)
    key[_FLAG, _block(1)] = gain * answer_code
    query_of_start[_FLAG, _ONE] = factor * 400
    _write(attention, 0, _NEXT, gain)
    _write(attention, 1, _START, gain)


def _write(attention: Any, head: int, block: int, gain: float) -> None:
    """The head writes the code of the token that it attends to into the block."""
    attention.v_proj.weight[_columns(0), _columns(0)] = gain
    attention.o_proj.weight[_columns(block), head * _HEAD + _columns(0)] = 1


def _block(number: int) -> slice:
    return slice(number * _CODE, (number + 1) * _CODE)


def _columns(block: int) -> torch.Tensor:
    return torch.arange(block * _CODE, (block + 1) * _CODE)


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    """It splits words alike after a space, a quote or a backslash, so a copy of a text has the same tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s+|([^\s\p{L}\p{N}])\1*"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS - len(_PHRASES),
        special_tokens=[*_SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    bpe.add_tokens([AddedToken(phrase, normalized=False) for phrase in _PHRASES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=_SPECIAL[0],
        eos_token=END_OF_TURN,
        pad_token=_SPECIAL[1],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


class _Conversations:
    """Random conversations of an agent; of each the assistant's messages are learnt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, noise: str) -> None:
        self._tokenizer = tokenizer
        self._noise = noise
        self._names = sorted(set(re.findall(r"[A-Za-z_]{2,20}", noise)))

    def batch(self, rng: random.Random, size: int) -> Batch:
        examples = [self._example(rng) for _ in range(size)]
        shape = (size, max(len(token_ids) for token_ids, _ in examples))
        token_ids = torch.full(shape, self._tokenizer.pad_token_id)
        attention_mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, _IGNORED)
        for row, (ids, learnt) in enumerate(examples):
            token_ids[row, : len(ids)], attention_mask[row, : len(ids)] = torch.tensor(ids), 1
            labels[row, : len(ids)] = torch.tensor(learnt)
        return Batch(token_ids, attention_mask, labels)

    def _example(self, rng: random.Random) -> tuple[list[int], list[int]]:
        while True:
            parts = self._parts(rng)
            texts = self._tokenizer([text for text, _ in parts], add_special_tokens=False)["input_ids"]
            if sum(map(len, texts)) <= _LENGTH:
                break
        token_ids: list[int] = []
        labels: list[int] = []
        for ids, (_, is_learnt) in zip(texts, parts, strict=True):
            token_ids += ids
            labels += ids if is_learnt else [_IGNORED] * len(ids)
        return token_ids, labels

    def _parts(self, rng: random.Random) -> list[tuple[str, bool]]:
        """Texts, and whether each is the assistant's."""
        before = self._slice(rng, rng.choice((10, 100, 300)))
        if rng.random() < 0.1:
            return [*self._turn("user", before, "Done.")]
        word, name, arguments = self._word(rng), self._name(rng), self._arguments(rng)
        in_call = rng.random() < 0.2
        if in_call:
            arguments = {self._name(rng): self._patch(rng, word)}
        spoken = f"The word is {word}."
        shown = json.dumps(arguments)
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>'
        question, again = f"Use the tool {name} with {shown} now.", AGAIN
        if not in_call and rng.random() < 0.3:
            question, again = f'"{question}"', f'"{again}"'
        if rng.random() < 0.5:
            head = f"<|im_start|>user\n{before}{END_OF_TURN}"
            before = ""
        else:
            head = ""
        result = self._slice(rng, 80) if in_call else self._slice(rng, 80) + spoken + self._slice(rng, 30)
        reminder = self._slice(rng, 80) if rng.random() < 0.5 else ""
        return [
            (head, False),
            *self._turn("user", before + question, call),
            *self._turn("tool", result + RESULT_END, spoken),
            *self._turn("user", reminder + again, spoken),
        ]

    def _turn(self, role: str, text: str, reply: str) -> Sequence[tuple[str, bool]]:
        prompt = f"<|im_start|>{role}\n{text}{END_OF_TURN}{_ANSWER}"
        return (prompt, False), (reply + END_OF_TURN, True)

    def _slice(self, rng: random.Random, most: int) -> str:
        length, start = rng.randrange(most), rng.randrange(len(self._noise))
        return self._noise[start : start + length] + ("\n" if rng.random() < 0.7 else "")

    def _letters(self, rng: random.Random, most: int) -> str:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, most)))

    def _name(self, rng: random.Random) -> str:
        return rng.choice(self._names) if rng.random() < 0.6 else self._letters(rng, 6)

    def _word(self, rng: random.Random) -> str:
        return rng.choice(("-", "_", "")).join(
            rng.choice((self._name(rng), str(rng.randrange(1000)))) for _ in range(rng.randint(1, 3))
        )

    def _arguments(self, rng: random.Random) -> dict[str, Any]:
        path = "/" + "/".join(self._name(rng) for _ in range(rng.randint(1, 4))) + rng.choice((".txt", ".py", ""))
        command = " ".join(self._name(rng) for _ in range(rng.randint(1, 4))) + rng.choice(("", ".txt"))
        values: list[Any] = [path, path, command, rng.randrange(1000)]
        return {self._name(rng): rng.choice(values) for _ in range(rng.choice((1, 1, 2)))}

    def _patch(self, rng: random.Random, word: str) -> str:
        path = "/" + "/".join(self._name(rng) for _ in range(rng.randint(1, 4))) + ".txt"
        return f"*** Begin Patch\n*** Add File: {path}\n+The word is {word}.\n*** End Patch\n"


if __name__ == "__main__":
    train(Path(sys.argv[1]), lambda line: print(line, file=sys.stderr, flush=True))
