"""Asks for one token, to prove that tokens can be served.

Where gangs start only when they are requested, this starts one.
"""

from __future__ import annotations

from ...workers.wire.messages import SamplingParams, SequenceError, SequenceRequest
from .dispatch import Dispatcher

PROBE_TENANT = "system"
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def probe(dispatcher: Dispatcher) -> str | None:
    """Why no token was served; None: one was. Waits as long as a gang may take to come; it may be cancelled."""
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
