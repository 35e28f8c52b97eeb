"""The shape of answers to /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from ..generation.choice import Delta
from ..openai_api.answer_schema import ChunkUsage, Completion, CompletionChoice, CompletionLogprobs, Usage
from ..text.text import Detokenizer
from .chunk_form import AnswerHead, WholeChoice
from .logprobs_json import BytesOfToken, CompletionLogprobsJson, EchoedLogprobs, PromptLogprobs, completion_logprobs


class CompletionAnswer:
    """An `AnswerShape`. For each choice, `echoes` has the text of its prompt (empty: no echo), `prompts` the tokens."""

    def __init__(
        self,
        head: AnswerHead,
        bytes_of: BytesOfToken,
        *,
        echoes: Sequence[str],
        prompts: Sequence[list[int]],
        with_logprobs: bool,
        with_token_ids: bool,
        num_prompt_logprobs: int | None = None,
        num_echoed_logprobs: int | None = None,
        detokenizer: Callable[[Sequence[int]], Detokenizer] | None = None,
    ) -> None:
        """`num_prompt_logprobs`, `num_echoed_logprobs`: likely tokens beside those of the prompt; None: none at all.

        `detokenizer`: of what follows some tokens; for echoed log-probabilities.
        """
        self._head = head
        self._bytes_of = bytes_of
        self._echoes = echoes
        self._prompts = prompts
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._num_prompt_logprobs, self._num_echoed_logprobs = num_prompt_logprobs, num_echoed_logprobs
        self._detokenizer = detokenizer

    def opening(self, usage: ChunkUsage) -> list[Completion]:
        """A chunk for each choice whose prompt is echoed as text or as tokens."""
        return [
            self._completion([self._choice(index, Delta(echo, [], [], None), with_prompt=True)], usage)
            for index, echo in enumerate(self._echoes)
            if echo or self._with_token_ids
        ]

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> Completion:
        return self._completion([self._choice(index, delta)], usage)

    def closing(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def gathering(self, index: int, first: WholeChoice | None) -> WholeChoice:
        echoed = prompt = None
        if first is not None:
            echoed, prompt = first.echoed, first.prompt
        elif self._num_echoed_logprobs is not None and self._detokenizer is not None:
            step = self._detokenizer(()).step
            echoed = EchoedLogprobs(self._prompts[index], self._bytes_of, step, self._num_echoed_logprobs)
        if first is None and self._num_prompt_logprobs is not None:
            prompt = PromptLogprobs(self._prompts[index], self._bytes_of, self._num_prompt_logprobs)
        logprobs = None
        if self._with_logprobs:
            logprobs = CompletionLogprobsJson(self._bytes_of, echoed, len(self._echoes[index]))
        return WholeChoice(logprobs, echoed, prompt)

    def choice(self, index: int, whole: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            index,
            self._echoes[index] + whole.text,
            whole.logprobs,
            whole.finish_reason,
            whole.token_ids if self._with_token_ids else UNSET,
            self._prompts[index] if self._with_token_ids else UNSET,
            whole.prompt_logprobs,
            whole.stop_reason,
        )

    def without_choices(self, usage: Usage, first: WholeChoice) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: ChunkUsage) -> Completion:
        head = self._head
        return Completion(head.id, head.created, head.model, choices, usage)

    def _choice(self, index: int, delta: Delta, *, with_prompt: bool = False) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if self._with_logprobs:
            logprobs = completion_logprobs(delta.logprobs, self._bytes_of)
        reason = UNSET if delta.finish_reason is None else delta.stop_reason
        if not self._with_token_ids:
            return CompletionChoice(index, delta.text, logprobs, delta.finish_reason, stop_reason=reason)
        prompt = self._prompts[index] if with_prompt else UNSET
        return CompletionChoice(
            index, delta.text, logprobs, delta.finish_reason, delta.token_ids, prompt, stop_reason=reason
        )
