"""The limit on what Serve reads ahead of a request, with Serve's own receiver."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve._private.http_util import ASGIReceiveProxy
from starlette.types import Message, Receive, Scope, Send

from motet.cluster.replicas.ingress import MAX_MESSAGES, BoundedReceive
from motet.tests.rigs.patience import PATIENCE_S

NUM_MESSAGES = 500


class Client:
    """Sends a long body as fast as it is read, then disconnects."""

    def __init__(self) -> None:
        self.num_read = 0

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        self.num_read += 1
        if self.num_read > NUM_MESSAGES:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"x", "more_body": self.num_read < NUM_MESSAGES}


async def send_nothing(message: Message) -> None:
    raise AssertionError(f"nothing is answered here: {message}")


async def test_a_body_is_read_no_faster_than_it_is_consumed() -> None:
    client = Client()
    num_ahead: list[int] = []
    body = b""

    async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal body
        for num_consumed in range(1, NUM_MESSAGES + 1):
            body += (await receive())["body"]
            await asyncio.sleep(0.001 if num_consumed < 50 else 0)
            num_ahead.append(client.num_read - num_consumed)
        assert (await receive())["type"] == "http.disconnect"

    scope: Any = {"type": "http"}
    receive = ASGIDIReceiveProxy(scope, client.receive, asyncio.get_running_loop())
    task = receive.fetch_until_disconnect_task()
    await asyncio.wait_for(BoundedReceive(slow_app)(scope, receive, send_nothing), PATIENCE_S)
    await asyncio.wait_for(task, PATIENCE_S)
    assert body == b"x" * NUM_MESSAGES
    assert max(num_ahead) <= MAX_MESSAGES + 2  # one in hand on either side of the queue


async def test_a_long_body_through_the_fallback_proxy_arrives_whole() -> None:
    """That proxy reads ahead without waiting, and fails at a limit."""
    client = Client()
    may_read = asyncio.Event()
    body = b""

    async def receive_messages(metadata: Any) -> bytes:
        """Receives as many messages at once as the proxy has at the time."""
        await may_read.wait()
        return pickle.dumps([await client.receive() for _ in range(NUM_MESSAGES // 2)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal body
        may_read.set()
        is_whole = False
        while not is_whole:
            message = await receive()
            body += message["body"]
            is_whole = not message["more_body"]

    scope: Any = {"type": "http"}
    receive = ASGIReceiveProxy(scope, None, receive_messages)  # only handed on
    task = asyncio.create_task(receive.fetch_until_disconnect())
    await asyncio.wait_for(BoundedReceive(app)(scope, receive, send_nothing), PATIENCE_S)
    assert body == b"x" * NUM_MESSAGES
    task.cancel()


async def test_other_servers_are_left_alone() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())

    await BoundedReceive(app)({"type": "http"}, Client().receive, send_nothing)
    assert received[0]["body"] == b"x"
