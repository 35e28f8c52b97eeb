"""How large a leader's frames become when a router asks for many streams again that have a long past."""

from __future__ import annotations

import msgspec

from motet.cluster.config import part_config
from motet.cluster.settings.settings import Settings
from motet.workers.engine_messages import EngineMessage
from motet.workers.leader.residency import KnownShares, Residency
from motet.workers.leader.routed_sequences import RoutedSequences
from motet.workers.leader.router_stream import RouterStream
from motet.workers.leader.served_engine import LeaderConfig, OnStep
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate, TokenLogprobs


class _NoEngine:
    """Takes everything and computes nothing."""

    alive = True

    def start(self, on_step: OnStep) -> None: ...

    def receive(self, message: EngineMessage) -> None: ...

    def stop(self) -> None: ...


async def resumed_frame_bytes(num_streams: int = 50, num_tokens: int = 5000, num_top: int = 20) -> list[int]:
    """Bytes of each frame by which another router gets the streams, each of so many tokens with log-probabilities."""
    sequences = RoutedSequences(_NoEngine(), part_config(LeaderConfig, Settings()), lambda keys: None)
    lost, back = RouterStream(1), RouterStream(2)
    sampling = SamplingParams(num_logprobs=num_top)
    requests = [
        SequenceRequest(sequence_id=n, prompt_token_ids=[1], sampling=sampling, tenant="a", key=f"k{n}")
        for n in range(num_streams)
    ]
    row = TokenLogprobs(-0.1, [*range(100_000, 100_000 + num_top)], [-0.1 * n for n in range(num_top)])
    for number, request in enumerate(requests, start=1):
        sequences.submit(lost, request)
        sequences.deliver([SequenceUpdate(number, [7] * num_tokens, [row] * num_tokens)])
    sequences.close(lost)
    for request in requests:
        sequences.submit(back, request)
    encoder, frames = msgspec.msgpack.Encoder(), []
    while back.has_news:
        frames.append(len(encoder.encode(back.take_frame(EngineLoad(), Residency(), list, KnownShares()))))
    return frames
