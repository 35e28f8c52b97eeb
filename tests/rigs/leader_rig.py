"""A leader, and a bare gRPC channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec

from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_engine import StandInEngine
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.engine_load import ServedElsewhere
from motet.workers.wire.messages import (
    AdapterRef,
    Cancel,
    Frame,
    FromLeader,
    Hello,
    Pinned,
    SamplingParams,
    SequenceRequest,
    SequenceUpdate,
    Submit,
    ToLeader,
)
from motet.workers.wire.stream_options import STREAM_METHOD, STREAM_SERVICE, TOKEN_KEY

TOKEN = "a secret"


class Leader:
    """A frame server, its engine and its address."""

    def __init__(self, engine: StandInEngine, server: FrameServer, address: str) -> None:
        self.engine, self.server, self.address = engine, server, address


class Router:
    """One stream to a leader."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.num_bytes = 0  # of the message that was read last
        self.channel = grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        self.call: Any = self.channel.stream_stream(f"/{STREAM_SERVICE}/{STREAM_METHOD}")(
            metadata=((TOKEN_KEY, token),)
        )

    async def send(self, *messages: Submit | Cancel | ServedElsewhere | Pinned) -> None:
        await self.call.write(msgspec.msgpack.encode(ToLeader(list(messages))))

    async def read(self) -> Hello | Frame:
        data = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert data is not grpc.aio.EOF, self.call.done()
        self.num_bytes = len(data)
        message: Hello | Frame = msgspec.msgpack.decode(data, type=FromLeader)
        return message

    async def read_to_the_end(self) -> None:
        while await self.call.read() is not grpc.aio.EOF:
            pass

    async def updates(self) -> AsyncIterator[SequenceUpdate]:
        while True:
            message = await self.read()
            if isinstance(message, Frame):
                for update in message.updates:
                    yield update


def submit(
    sequence_id: int, last_token: int, max_tokens: int | None, digest: str | None = None, key: str = ""
) -> Submit:
    return Submit(
        SequenceRequest(
            sequence_id=sequence_id,
            prompt_token_ids=[1, last_token],
            sampling=SamplingParams(max_tokens=max_tokens),
            tenant="acme",
            adapter=None if digest is None else AdapterRef(digest, {}),
            key=key,
        )
    )
