"""What a client does with files and batches, at a `RealFront`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx

from motet.adapters.registry.batches.records import ENDED
from motet.tests.rigs.quota_rig import until
from motet.tests.rigs.real_front import OWNER_KEY, OWNERS_ADAPTER, RealFront

COMPLETIONS = "/v1/completions"


def line(custom_id: str, *, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    body = {"model": OWNERS_ADAPTER, "prompt": "hi", "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def lines_of(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class BatchClient:
    def __init__(self, front: RealFront, key: str = OWNER_KEY) -> None:
        self.front, self.key = front, key

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with self.front.client() as client:
            return await client.request(method, path, headers={"Authorization": f"Bearer {self.key}"}, **options)

    async def done(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON. The request must not be refused."""
        answer = await self.ask(method, path, **options)
        assert answer.is_success, answer.text
        return answer.json()

    async def send(self, content: bytes, **fields: str) -> httpx.Response:
        return await self.ask(
            "POST", "/v1/files", data={"purpose": "batch", **fields}, files={"file": ("work.jsonl", content)}
        )

    async def upload(self, lines: Iterable[Any]) -> str:
        answer = await self.send(lines_of(lines))
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    async def create(self, file_id: str, endpoint: str = COMPLETIONS, **fields: Any) -> str:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
        return str((await self.done("POST", "/v1/batches", json=body))["id"])

    async def batch(self, batch_id: str) -> Any:
        return await self.done("GET", f"/v1/batches/{batch_id}")

    async def ended(self, batch_id: str) -> Any:
        """The batch once it has ended."""
        found: Any = None

        async def has_ended() -> bool:
            nonlocal found
            found = await self.batch(batch_id)
            return found["status"] in ENDED

        await until(has_ended)
        return found

    async def lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        answer = await self.ask("GET", f"/v1/files/{file_id}/content")
        assert answer.is_success, answer.text
        return [json.loads(one) for one in answer.content.splitlines()]
