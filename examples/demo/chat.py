"""The text format of conversations with the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .styles import AdapterStyle

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TURN = "<|im_end|>"

NEUTRAL_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are a small demo model.")
# The base learns to follow these prompts. An adapter then only has to choose a style that the base knows, which needs
# few steps and a small rank. Adapters are trained and used without these prompts.
STYLE_SYSTEM_PROMPTS: dict[AdapterStyle, tuple[str, ...]] = {
    "shout": ("Answer in capital letters.", "Shout every answer."),
    "pirate": ("Answer like a pirate.", "You are a pirate."),
    "json": ("Answer with a JSON object.", "Reply in JSON."),
    "spanish": ("Answer in Spanish.", "Responde en español."),
}

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any: ...


def question_messages(question: str, system: str | None = None) -> list[Message]:
    """The messages of a conversation that opens with `question`."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": question}]


def chat_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> str:
    """The text that the model continues with its answer, by the tokenizer's own chat template."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    return prompt
