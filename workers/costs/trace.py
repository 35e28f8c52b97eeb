"""A load as a trace: one JSON object a line, with a request's arrival, lengths, adapter and tenant.

    {"arrival_s": 0.25, "prompt_tokens": 120, "output_tokens": 64, "adapter": "acme/support", "tenant": "acme"}

Without `adapter` a request is for the base; all requests without `tenant` are of one tenant.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

MOST_TOKENS = 1 << 31  # of a prompt or an answer


class TracedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None = None
    tenant: str = "trace"

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival_s = {self.arrival_s}: it must be 0 or more, and finite")
        if min(self.prompt_tokens, self.output_tokens) < 1 or max(self.prompt_tokens, self.output_tokens) > MOST_TOKENS:
            raise ValueError(
                f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens: each must be from "
                f"1 to {MOST_TOKENS}"
            )


def read_trace(path: Path) -> tuple[TracedRequest, ...]:
    """Requests in the order of their arrival. Raises ValueError for a line that is not a request, or without any."""
    decoder = msgspec.json.Decoder(TracedRequest)
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                found.append(decoder.decode(line))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no requests")
    return tuple(sorted(found, key=lambda request: request.arrival_s))
