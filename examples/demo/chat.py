"""The text format of conversations with the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .styles import AdapterStyle

# Without tools and calls it renders messages alone, as the base and the adapters of styles were trained on them. Of a
# tool it shows the name and its arguments' names: the base knows only short conversations.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}"
    "{{ tool.function.name + '(' + (tool.function.parameters.properties or {}) | join(', ') + ')\n' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n{\"name\": ' + call.function.name | tojson }}"
    "{{ ', \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TURN = "<|im_end|>"
# How the text of an answer is read: what transformers calls a response template. It stands in `tokenizer_config.json`.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END_OF_TURN, "content": "text"},
    },
}

NEUTRAL_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are a small demo model.")
# The base learns to follow these prompts. An adapter then only has to choose a style that the base knows, which needs
# few steps and a small rank. Adapters are trained and used without these prompts.
STYLE_SYSTEM_PROMPTS: dict[AdapterStyle, tuple[str, ...]] = {
    "shout": ("Answer in capital letters.", "Shout every answer."),
    "pirate": ("Answer like a pirate.", "You are a pirate."),
    "json": ("Answer with a JSON object.", "Reply in JSON."),
    "spanish": ("Answer in Spanish.", "Responde en español."),
}

Message = dict[str, Any]
Tool = dict[str, Any]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any: ...


def question_messages(question: str, system: str | None = None) -> list[Message]:
    """The messages of a conversation that opens with `question`."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": question}]


def chat_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """The text that the model continues with its answer, by the tokenizer's own chat template."""
    return _rendered(tokenizer, messages, tools, add_generation_prompt=True)


def answered(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """The text of the last message, an assistant's, as the model is to write it: with its end."""
    prompt = chat_prompt(tokenizer, messages[:-1], tools)
    whole = _rendered(tokenizer, messages, tools, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix("\n")


def _rendered(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text
