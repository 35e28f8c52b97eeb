"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters of the server's own folders."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...adapters.errors import NameTaken
from ...adapters.names import PRIVATE
from ..config import CurrentConfig
from ..openai_api.errors import invalid_value
from ..route import route
from ..tenants.identity import Identity
from ..text.answer_formats import FORMATS
from .adapter_folder import (
    MAX_PATH_CHARS,
    Limits,
    folder_below,
    loaded_already,
    read_adapter,
    read_tokenizer,
    tensors_bytes,
)
from .adapters_api import AdaptersApi
from .upload_form import MAX_CONFIG_BYTES, TEMPLATE_FIELD, UploadForm
from .upload_spool import UploadRoom

_SENTENCE = {"text/plain": "A sentence."}
Name = Annotated[str, Meta(max_length=256, description="What requests call it in `model`.")]


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(max_length=MAX_PATH_CHARS, description="A folder of the server, as PEFT saves it.")]
    load_inplace: Annotated[bool | None, Meta(description="Another version of one that is there.")] = None
    response_template: Annotated[
        str | None, Meta(description=f"Of an upload, in which form it writes: {', '.join(FORMATS)}.")
    ] = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: Name
    lora_int_id: Annotated[int | None, Meta(description="Makes no difference.")] = None


def _registered(name: str) -> str:
    """What is uploaded under a plain name is the tenant's, also where the caller has a private one of the name."""
    return name if name.startswith(PRIVATE) else f"{PRIVATE}/{name}"


class LoraAdaptersApi:
    def __init__(self, config: CurrentConfig, adapters: AdaptersApi) -> None:
        self._config, self._adapters = config, adapters

    @route(
        "POST",
        "/v1/load_lora_adapter",
        scope="upload",
        summary="Upload an adapter from a folder of the server.",
        texts=_SENTENCE,
        errors=AdaptersApi.UPLOAD_ERRORS,
    )
    async def load(self, request: Request, identity: Identity, body: LoadBody) -> Response:
        """Only from folders that the operator has allowed (`--adapter-folders`). It is checked as an upload is."""
        if body.response_template and body.response_template not in FORMATS:
            raise invalid_value(TEMPLATE_FIELD, f"it is none of {', '.join(FORMATS)}.")
        folders = self._config.now.adapter_folders
        root, folder = await asyncio.to_thread(folder_below, body.lora_path, folders, identity.name)
        if not body.load_inplace and await self._adapters.has(identity, _registered(body.lora_name)):
            raise loaded_already(body.lora_name)
        try:
            _, _, warnings = await self._adapters.take(request, identity, partial(self._read, body, root, folder))
        except NameTaken as error:  # by another upload meanwhile
            raise loaded_already(body.lora_name) from error
        said = "".join(f" Warning: {warning}." for warning in warnings)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.{said}")

    @route(
        "POST",
        "/v1/unload_lora_adapter",
        scope="upload",
        summary="Delete an adapter.",
        texts=_SENTENCE,
        errors=("adapter_not_found", "registry_unavailable"),
    )
    async def unload(self, request: Request, identity: Identity, body: UnloadBody) -> Response:
        """The folder that it came from stays."""
        await self._adapters.remove(request, identity, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read(self, body: LoadBody, root: Path, folder: Path, tensors_path: Path, room: UploadRoom) -> UploadForm:
        limits = Limits(MAX_CONFIG_BYTES, self._config.now.max_upload_bytes)
        num_bytes = await asyncio.to_thread(tensors_bytes, root, folder, limits)
        room.grow(num_bytes)
        limits = Limits(MAX_CONFIG_BYTES, num_bytes)
        config = await asyncio.to_thread(read_adapter, root, folder, tensors_path, limits)
        room.wrote(num_bytes)
        return UploadForm(
            body.lora_name,
            config,
            must_be_new=not body.load_inplace,
            tokenizer=await asyncio.to_thread(read_tokenizer, root, folder),
            response_template=body.response_template or "",
        )
