"""What well-behaved tenants do all day: stream answers, leave in the middle, upload new versions, delete."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import load_file, save

ADAPTERS = Path(__file__).parents[2] / "examples" / "demo" / "adapters"
VOICES = ("pirate", "shout")
NUM_NAMES = 12  # adapters of each tenant
QUESTIONS = ("What is the capital of Peru?", "What color is the sky?", "Who are you?", "Count to ten.")
TIMEOUT_S = 300.0


@dataclass
class TrafficResult:
    """The outcomes of requests."""

    first_token_s: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)  # how requests ended
    unexplained: list[str] = field(default_factory=list)  # requests that ended without saying why


class Tenant:
    """Closed loops of one tenant: each asks again as soon as it is answered."""

    def __init__(self, url: str, name: str, key: str, model: str, seed: int) -> None:
        self.name = name
        self.result = TrafficResult()
        self._model, self._draw = model, random.Random(seed)
        self._uploaded: list[str] = []
        self._num_uploads = 0
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S, trust_env=False
        )

    async def ask_forever(self) -> None:
        while True:
            await self._ask()

    async def upload_forever(self, every_s: float) -> None:
        """New versions under old names, and now and then a name that goes."""
        while True:
            await self._upload()
            if len(self._uploaded) > NUM_NAMES // 2 and self._draw.random() < 0.05:
                name = self._uploaded.pop(self._draw.randrange(len(self._uploaded)))
                self._note_answer(await self._send("DELETE", f"/v1/adapters/{name}"), "delete")
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self) -> None:
        """One streamed chat. One in ten clients leaves in the middle of it."""
        draw = self._draw
        model = draw.choice([self._model, *self._uploaded]) if draw.random() < 0.8 else self._model
        leaves_after = draw.randrange(1, 8) if draw.random() < 0.1 else None
        body = {
            "model": model,
            "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
            "max_tokens": draw.choice((8, 16, 32, 64)),
            "stream": True,
            "ignore_eos": draw.random() < 0.5,
        }
        began_at = time.monotonic()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._note_answer(answer, "chat")
                    return
                await self._listen(answer, began_at, leaves_after)
        except httpx.HTTPError as error:
            self.result.unexplained.append(f"chat: {error!r}")

    async def _listen(self, answer: httpx.Response, began_at: float, leaves_after: int | None) -> None:
        num_events = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.result.ends["done"] += 1
                return
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.result.ends[f"chat: error in the stream: {event['error'].get('code')}"] += 1
                return
            num_events += 1
            if num_events == 1:
                self.result.first_token_s.append(time.monotonic() - began_at)
            if num_events == leaves_after:
                self.result.ends["left"] += 1
                return
        self.result.unexplained.append("chat: the stream ended")

    async def _upload(self) -> None:
        name = f"voice-{self._draw.randrange(NUM_NAMES)}"
        self._num_uploads += 1
        folder = ADAPTERS / self._draw.choice(VOICES)
        tensors = load_file(folder / "adapter_model.safetensors")
        scale = np.float32(0.9 + 0.2 * self._draw.random())
        data = save({key: tensor * scale for key, tensor in tensors.items()})
        files = {
            "adapter_config.json": ("adapter_config.json", (folder / "adapter_config.json").read_bytes()),
            "adapter_model.safetensors": ("adapter_model.safetensors", data),
        }
        answer = await self._send("POST", "/v1/adapters", data={"name": name}, files=files)
        self._note_answer(answer, "upload")
        if answer is not None and answer.status_code in (200, 201) and name not in self._uploaded:
            self._uploaded.append(name)

    async def _send(self, method: str, path: str, **given: object) -> httpx.Response | None:
        try:
            return await self._http.request(method, path, **given)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            self.result.unexplained.append(f"{method} {path}: {error!r}")
            return None

    def _note_answer(self, answer: httpx.Response | None, what: str) -> None:
        if answer is None:
            return
        if answer.status_code < 300:
            self.result.ends[what] += 1
            return
        try:
            code = answer.json()["error"]["code"]
        except (ValueError, KeyError, TypeError):
            self.result.unexplained.append(f"{what}: {answer.status_code} {answer.text[:200]}")
        else:
            self.result.ends[f"{what}: refused with {answer.status_code} {code}"] += 1
