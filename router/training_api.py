"""What trainers of reinforcement learning (TRL's AsyncGRPO) read of a server, and what they cannot change of it.

The routes have vLLM's names. Pauses are in `pauses.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..adapters.adapter import MAX_RANK
from .http.auth import Identity
from .http.errors import ApiError, invalid_value
from .http.route import route
from .versions.version_choice import BaseModel

RANK_OF_ADAPTERS: Final = 16  # of those of which `max_loras` says how many the pool holds


class ServedModel(msgspec.Struct, frozen=True):
    model: str
    dtype: str  # as torch writes it
    max_model_len: int


class Parallelism(msgspec.Struct, frozen=True):
    data_parallel_size: int = 1  # every gang has every adapter


class LoraLimits(msgspec.Struct, frozen=True):
    max_loras: int
    max_lora_rank: int = MAX_RANK


class ServerConfig(msgspec.Struct, frozen=True):
    model_config: ServedModel
    lora_config: LoraLimits
    parallel_config: Parallelism = Parallelism()


class ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: ServerConfig


class WorldSize(msgspec.Struct, frozen=True):
    world_size: int


_refused: Final = partial(
    route,
    "POST",
    scope="upload",
    summary="Refused: the base is not changed.",
    texts={"text/plain": "Never."},
    errors=("base_is_fixed",),
)


class TrainingApi:
    def __init__(self, base: BaseModel, adapter_pages: int) -> None:
        """`adapter_pages`: that an adapter of rank `RANK_OF_ADAPTERS` on all linears takes in a gang's pool."""
        self._base, self._adapter_pages = base, adapter_pages

    @route(
        "GET",
        "/server_info",
        scope="infer",
        summary="What trainers read of a server.",
        query={"config_format": Literal["json"]},
        errors=("gang_lost",),
    )
    async def server_info(self, request: Request, identity: Identity) -> ServerInfo:
        """`max_loras`: adapters of rank 16 that a gang's pool holds, which is no limit: others come when requested."""
        if (form := request.query_params.get("config_format", "json")) != "json":
            raise invalid_value("config_format", f"{form[:20]!r}: only `json` is there.")
        gang = await self._base.gang()
        model = ServedModel(self._base.name, f"torch.{gang.dtype}", gang.max_model_len)
        return ServerInfo(ServerConfig(model, LoraLimits(max(1, gang.num_pages // self._adapter_pages))))

    @route("GET", "/get_world_size", scope="infer", summary="How many processes take weights from a trainer: none.")
    async def world_size(self, request: Request, identity: Identity) -> WorldSize:
        return WorldSize(0)

    @_refused("/init_weight_transfer_engine")
    @_refused("/start_weight_update")
    @_refused("/update_weights")
    @_refused("/finish_weight_update")
    async def update_weights(self, request: Request, identity: Identity) -> Response:
        """All tenants share the base: a trainer uploads LoRA adapters, and never whole weights."""
        message = (
            "motet's base is shared and its weights never change: train a LoRA adapter, which is loaded by "
            "/v1/load_lora_adapter (TRL: `peft_config`, not whole models)."
        )
        raise ApiError(400, message, code="base_is_fixed")
