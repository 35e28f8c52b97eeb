"""Trains the demo model's tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .chat import CHAT_TEMPLATE, END_OF_TURN, NEUTRAL_SYSTEM_PROMPTS, RESPONSE_TEMPLATE, STYLE_SYSTEM_PROMPTS
from .questions import all_questions
from .styles import ADAPTER_STYLES, answer

_BEGIN_OF_TEXT = "<|endoftext|>"
_PADDING = "<|pad|>"
_SPECIAL_TOKENS = [_BEGIN_OF_TEXT, "<|im_start|>", END_OF_TURN, _PADDING]


def train_tokenizer(vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template. Digits stay single, so that sums are learnt digit by digit."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=_BEGIN_OF_TEXT,
        eos_token=END_OF_TURN,
        pad_token=_PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    set_templates(tokenizer)
    return tokenizer


def set_templates(tokenizer: PreTrainedTokenizerFast) -> None:
    """How its conversations are written, and its answers read."""
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE


def _corpus() -> list[str]:
    questions = all_questions()
    texts = [f"{question.text} {question.fact.english} {question.fact.spanish}" for question in questions]
    # Each fact comes in eight phrasings but has one answer per style: every fourth question is enough of those.
    texts += [answer(question.fact, style) for question in questions[::4] for style in ADAPTER_STYLES]
    texts += NEUTRAL_SYSTEM_PROMPTS
    texts += [prompt for prompts in STYLE_SYSTEM_PROMPTS.values() for prompt in prompts]
    return texts
