"""One token for nobody: proves that a token can be served, and brings a gang where there is none until one asks."""

from __future__ import annotations

from ...workers.wire.messages import SamplingParams, SequenceError, SequenceRequest
from .dispatch import Dispatcher

PROBE_TENANT = "system"
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def probe(dispatcher: Dispatcher) -> str | None:
    """Why no token was served; None: one was. Takes as long as a gang may take to come; cancelling it is fine."""
    error: SequenceError | None = None
    stream = dispatcher.submit(SequenceRequest(prompt_token_ids=[0], sampling=_PROBE, tenant=PROBE_TENANT))
    try:
        async for update in stream:
            if update.token_ids:
                return None
            error = update.error or error
    finally:
        stream.cancel()
    return f"no token can be served: {error.message if error is not None else 'the sequence ended without one'}"
