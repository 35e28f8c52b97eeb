"""A stand-in for a running motet: the HTTP surface that the command line uses, on a thread of this process."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request  # which Ray Serve brings
from fastapi.responses import JSONResponse, StreamingResponse

from motet.tests.rigs.patience import eventually

KEY = "secret-of-acme"
BASE = "base-model"


class FakeMotet:
    """A server that records requests, holds adapters, and answers with the question in capitals, word by word."""

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, Any]] = {}
        self.page_size = 1000  # of the list of adapters
        self.num_pages = 0  # of it that were requested
        self.uploaded_bytes = 0
        self.guards_status = False
        self.lacks_tokens = False  # those that adapters' tokenizers add
        self.warnings: list[str] = []  # of every adapter that is uploaded
        self.chats: list[dict[str, Any]] = []
        self.break_stream_with: str | None = None  # "error": an error event; "cut": the connection ends early
        self.url = ""
        self.app = FastAPI()
        self._add_routes(self.app)

    def _add_routes(self, app: FastAPI) -> None:
        @app.exception_handler(HTTPException)
        async def in_openai_shape(request: Request, error: HTTPException) -> JSONResponse:
            body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
            return JSONResponse(body, error.status_code)

        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, Any]:
            check_key(request)
            return {"object": "list", "data": [{"id": name} for name in (BASE, *self.adapters)]}

        @app.get("/v1/adapters")
        async def adapters(request: Request) -> dict[str, Any]:
            check_key(request)
            names = sorted(name for name in self.adapters if name > request.query_params.get("after", ""))
            page = names[: self.page_size]
            self.num_pages += 1
            return {
                "object": "list",
                "data": [self.adapters[name] for name in page],
                "last_id": page[-1] if page else None,
                "has_more": len(page) < len(names),
            }

        @app.post("/v1/adapters")
        async def upload(request: Request) -> JSONResponse:
            check_key(request)
            async with request.form() as form:
                name, config = form["name"], json.loads(await form["adapter_config.json"].read())  # type: ignore[union-attr]
                tensors = await form["adapter_model.safetensors"].read()  # type: ignore[union-attr]
                own = json.loads(str(form.get("tokenizer", "{}")))
            if self.lacks_tokens and own.get("added_tokens"):
                raise HTTPException(400, "the adapter's tokenizer adds tokens")
            self.uploaded_bytes += len(tensors)
            digest = hashlib.sha256(tensors).hexdigest()
            held = self.adapters.get(str(name))
            if held is not None and held["digest"] == digest:
                return JSONResponse(held, 200)
            self.adapters[str(name)] = {
                "name": name,
                "version": held["version"] + 1 if held else 1,
                "digest": digest,
                "rank": config["r"],
                "targets": config["target_modules"],
                "bytes": len(tensors),
                "warnings": self.warnings,
            }
            return JSONResponse(self.adapters[str(name)], 201)

        @app.get("/v1/adapters/{name}")
        async def show(request: Request, name: str) -> dict[str, Any]:
            check_key(request)
            if name not in self.adapters:
                raise HTTPException(404, f"there is no adapter {name!r}")
            return self.adapters[name]

        @app.delete("/v1/adapters/{name}")
        async def delete(request: Request, name: str) -> dict[str, Any]:
            check_key(request)
            if name not in self.adapters:
                raise HTTPException(404, f"there is no adapter {name!r}")
            del self.adapters[name]
            return {"name": name, "deleted": True}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> StreamingResponse:
            check_key(request)
            body = await request.json()
            self.chats.append(body)
            if body["model"] not in (BASE, *self.adapters):
                raise HTTPException(404, f"there is no model {body['model']!r}")
            return StreamingResponse(self._events(body["messages"][-1]["content"]), media_type="text/event-stream")

        @app.get("/status")
        async def status(request: Request) -> dict[str, Any]:
            if self.guards_status:
                check_key(request)
            return {"version": "0.1.0", "model": BASE}

        @app.get("/not-json/status")
        async def not_json() -> StreamingResponse:
            return StreamingResponse(iter(["<html>"]))

        @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        async def other(request: Request) -> None:
            check_key(request)
            raise HTTPException(404, "there is no such route")

    async def _events(self, question: str) -> Any:
        words = [word + " " for word in question.upper().split()]
        for word in words:
            yield event({"choices": [{"delta": {"content": word}, "finish_reason": None}]})
            if self.break_stream_with == "error":
                yield event({"error": {"message": "the worker died", "type": "server_error"}})
                yield "data: [DONE]\n\n"
                return
            if self.break_stream_with == "cut":
                return
        yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        yield event({"choices": [], "usage": {"completion_tokens": len(words)}})
        yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def check_key(request: Request) -> None:
    if request.headers.get("authorization") != f"Bearer {KEY}":
        raise HTTPException(401, "the API key is unknown")


@contextmanager
def running_fake() -> Iterator[FakeMotet]:
    """A fake that answers at its `url` until the block ends."""
    fake = FakeMotet()
    server = uvicorn.Server(uvicorn.Config(fake.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started, "the fake server ended"
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        thread.join()
