"""llama-index, by its class for servers that are like OpenAI's."""

from __future__ import annotations

from typing import Any

from demo import AGENT, ANSWER, ARGUMENTS, BASE, FACT, JSON, KEY, QUESTION, RESULT, TOOL_QUESTION, V1, Fact, same
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def chat(model: str, **options: Any) -> Any:
    return OpenAILike(
        model=model,
        api_base=V1,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        **options,
    )


def weather(country: str) -> str:
    """The weather in a country now."""
    return RESULT


def text() -> None:
    same(chat(BASE).chat([ChatMessage(role="user", content=QUESTION)]).message.content, ANSWER)


def stream() -> None:
    *_, last = chat(BASE).stream_chat([ChatMessage(role="user", content=QUESTION)])
    same(last.message.content, ANSWER)


def tools() -> None:
    model = chat(AGENT)
    found = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=TOOL_QUESTION)
    (call,) = model.get_tool_calls_from_response(found)
    same((call.tool_name, call.tool_kwargs), ("weather", ARGUMENTS))


def schema() -> None:
    model = chat(JSON, should_use_structured_outputs=True).as_structured_llm(Fact)
    same(model.chat([ChatMessage(role="user", content=QUESTION)]).raw, Fact(**FACT))


def embeddings() -> None:
    found = OpenAILikeEmbedding(model_name=BASE, api_base=V1, api_key=KEY)
    same(len(found.get_text_embedding_batch([QUESTION, "hello"])), 2)


CHECKS = (text, stream, tools, schema, embeddings)
