"""Bodies of requests that take a router's time, memory or slots, while a neighbour asks for short chats."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from motet.adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from motet.tests.rigs.neighbour import Neighbour
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet

ATTACKER = "globex"
MIB = 1 << 20
NICENESS = 10
FORM = "multipart/form-data; boundary=of-the-test"


@contextmanager
def attacking(
    motet: RunningMotet, path: str, bodies: list[bytes], num_clients: int, content_type: str = "application/json"
) -> Iterator[None]:
    """Sends the bodies again and again, so many at once, until the block ends.

    Only their cost to the server should show: their own work, on the same cores, runs at the lowest priority.
    """
    ended = threading.Event()

    def attack(number: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with motet.http(ATTACKER) as http:
            while not ended.is_set():
                for body in bodies[number % len(bodies) :]:
                    try:
                        http.post(path, content=body, headers={"Content-Type": content_type}, timeout=60.0)
                    except httpx.HTTPError:
                        pass  # what is refused early may be cut off while it is sent

    threads = [threading.Thread(target=attack, args=(number,), daemon=True) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def listed(element: str, num_bytes: int) -> str:
    return "[" + ",".join([element] * (num_bytes // (len(element) + 1))) + "]"


def test_large_json_takes_no_time_of_others(
    motet: RunningMotet, holds: Callable[..., None], scaled: Callable[[int], int]
) -> None:
    size = scaled(15 * MIB)
    start = f'{{"model":"{BASE}",'
    bodies = [
        f'{start}"tools":{listed("[]", size)},"messages":[{{"role":"user","content":"a"}}]}}',
        f'{start}"messages":{listed(json.dumps({"role": "user", "content": ""}), size)}}}',
        f'{start}"messages":{listed(json.dumps({"role": "user", "content": ""}), 300_000)}}}',
    ]
    encoded = [body.encode() for body in bodies]
    holds(lambda: attacking(motet, "/v1/chat/completions", encoded, 2), at_most=2.0)


def test_stop_strings_and_beams_take_no_time_of_others(motet: RunningMotet, holds: Callable[..., None]) -> None:
    """One at a time: a gang's own time is shared fairly by a later issue. Of beams, some are stopped in every round."""
    stops = {"stop": ["a" * 2999 + chr(98 + number) for number in range(16)], "prompt": "a" * 100, "max_tokens": 50}
    long = {"stop": ["a" * 255 + chr(98 + number) for number in range(16)], "prompt": "a", "max_tokens": 50}
    beams = {"use_beam_search": True, "n": 16, "length_penalty": 10, "stop": [*"aeio"], "prompt": "a", "max_tokens": 50}
    bodies = [json.dumps({"model": BASE, **fields}).encode() for fields in (stops, long, beams)]
    holds(lambda: attacking(motet, "/v1/completions", bodies, 1), at_most=3.0)


def upload_form(config: dict[str, Any], tensors: bytes) -> bytes:
    """The body of an upload, of the type FORM."""
    files: Any = {CONFIG_FILE: ("c", json.dumps(config).encode()), TENSORS_FILE: ("t", tensors)}
    headers = {"Content-Type": FORM}
    return httpx.Request("POST", "http://a", data={"name": "x"}, files=files, headers=headers).read()


def header_of(num_bytes: int) -> bytes:
    """The begin of a safetensors file: so many bytes of tensors that no adapter has."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
    entry = f'"{name}":' + '{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    header = "{" + ",".join(entry.format(number) for number in range(num_bytes // len(entry) + 1)) + "}"
    return len(header).to_bytes(8, "little") + header.encode()


def test_refused_uploads_take_no_time_of_others(
    motet: RunningMotet, holds: Callable[..., None], scaled: Callable[[int], int]
) -> None:
    """What held the router's loop once: long headers, lists of names, and expressions that backtrack."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    names = [f"m{number}" for number in range(scaled(100_000))]
    bodies = [
        upload_form(config, header_of(scaled(8_000_000))),
        upload_form(config | {"exclude_modules": names}, header_of(100)),
        upload_form(config | {"target_modules": r"(\w+|[a-z._0-9]+)+!"}, header_of(100)),
    ]
    with motet.http(ATTACKER) as http:
        for body in bodies:
            answer = http.post("/v1/adapters", content=body, headers={"Content-Type": FORM})
            assert answer.status_code in (400, 413), answer.text
    holds(lambda: attacking(motet, "/v1/adapters", bodies, 3, FORM), at_most=3.0)


def unfinished(motet: RunningMotet, path: str, num_bytes: int, content_type: str, start: bytes = b"") -> socket.socket:
    """A connection that has sent so much of a body, or as much as was taken, and says nothing more."""
    host, port = motet.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=1.0)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEYS[ATTACKER]}\r\n"
    head += f"Content-Type: {content_type}\r\nContent-Length: {num_bytes + 100_000}\r\n\r\n"
    try:
        connection.sendall(head.encode() + start + b" " * (num_bytes - len(start)))
    except OSError:
        pass
    return connection


def resident_bytes(motet: RunningMotet) -> int:
    return sum(process.memory_info().rss for process in motet.router_processes() if process.is_running())


def test_unfinished_bodies_are_bounded_and_their_memory_returns(
    motet: RunningMotet, neighbour: Neighbour, scaled: Callable[[int], int]
) -> None:
    neighbour.measured_for(1.0)
    before = resident_bytes(motet)
    with ExitStack() as open_ones:
        for _ in range(scaled(100)):
            connection = unfinished(motet, "/v1/completions", 15 * MIB, "application/json")
            open_ones.enter_context(connection)
        assert resident_bytes(motet) - before < 150 * MIB
        assert not neighbour.measured_for(1.0).errors
    eventually(lambda: resident_bytes(motet) - before < 50 * MIB)


def test_stalled_uploads_delay_no_other_request(motet: RunningMotet) -> None:
    with ExitStack() as open_ones, motet.http("acme") as http:
        for _ in range(8):
            start = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n'
            connection = unfinished(motet, "/v1/adapters", 200, "multipart/form-data; boundary=x", start)
            open_ones.enter_context(connection)
        time.sleep(0.5)
        files: Any = {CONFIG_FILE: ("c", b"{}"), TENSORS_FILE: ("t", b"")}
        response = http.post("/v1/adapters", data={"name": "x"}, files=files, timeout=20.0)
        assert response.status_code == 400  # it was read, and is no adapter
