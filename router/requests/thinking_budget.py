"""After how many tokens a model's thoughts end: vLLM's `thinking_token_budget`."""

from __future__ import annotations

from ...workers.wire.token_rules import ThinkingBudget
from ..openai_api.request_schema import ChatRequest
from ..text.response_reader import ResponseReader
from ..text.text import TextService


def thinking_budget(
    request: ChatRequest, reader: ResponseReader | None, text: TextService
) -> tuple[ThinkingBudget | None, bool]:
    """None: they may go on. And whether what was requested can be held: tokens show where thoughts begin and end.

    `reader`: of the answer, at its begin.
    """
    num_tokens = request.thinking_token_budget
    if num_tokens is None or num_tokens < 0:
        return None, True
    if reader is None or not reader.reading.format.has_reasoning:
        return None, False
    texts = reader.reading.format.thought_marks
    marks = None if texts is None else [text.mark_ids(mark) for mark in texts]
    if marks is None or None in marks:
        return None, False
    begin, end = (mark for mark in marks if mark is not None)
    return ThinkingBudget(num_tokens, begin, end, reader.is_reasoning), True
