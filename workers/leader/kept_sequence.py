"""What a leader remembers of one sequence with a key, and how a router that asks for it again gets it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..wire.kept_logprobs import KeptLogprobs
from ..wire.messages import FinishReason, SequenceError, SequenceRequest, SequenceUpdate
from ..wire.sequence_usage import SequenceUsage
from ..wire.unread_update import UnreadUpdate


@dataclass(eq=False, slots=True)
class KeptSequence:
    engine_id: int
    request: SequenceRequest
    owner: int | None  # number of the router stream that receives its updates; None: an orphan
    token_ids: list[int]  # all generated ones, including those that came with the request
    num_without_logprobs: int  # of the first tokens: those it came with, or all whose log-probabilities were dropped
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)  # of the other tokens, if requested
    finish_reason: FinishReason | None = None
    error: SequenceError | None = None
    num_cached_tokens: int | None = None
    usage: SequenceUsage | None = None  # as last reported
    expires_at: float | None = None  # None: it has an owner and goes on
    left_by: str = ""  # the router's connection that left it as an orphan last

    @property
    def name(self) -> tuple[str, str]:
        return self.request.tenant, self.request.key

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def num_values(self) -> int:
        return len(self.token_ids) + self.logprobs.num_values

    def answers(self, request: SequenceRequest) -> bool:
        """Whether this sequence is what a request with its name asks for."""
        own, so_far = self.request, request.generated_token_ids
        return (
            own.prompt_token_ids == request.prompt_token_ids
            and own.sampling == request.sampling
            and (own.adapter and own.adapter.digest) == (request.adapter and request.adapter.digest)
            and self.token_ids[: len(so_far)] == so_far
            and (own.sampling.num_logprobs is None or len(so_far) >= self.num_without_logprobs)
        )

    def drop_logprobs(self) -> None:
        """Only a router that has all tokens so far can ask for it from now on."""
        self.logprobs, self.num_without_logprobs = KeptLogprobs(), len(self.token_ids)

    def rest_for(self, request: SequenceRequest) -> UnreadUpdate:
        """What the sequence has beyond the tokens that come with the request, under the request's id."""
        num_had = len(request.generated_token_ids)
        state = SequenceUpdate(
            request.sequence_id,
            [],
            None,
            self.finish_reason,
            self.error,
            self.num_cached_tokens,
            usage=self.usage,
        )
        logprobs = None
        if self.request.sampling.num_logprobs is not None:
            logprobs = self.logprobs.copy_from(num_had - self.num_without_logprobs)
        return UnreadUpdate(state, array("I", self.token_ids[num_had:]), logprobs)
