"""What a launch writes into the registry before it serves: its base, and the keys that it gives.

`motet serve` does so once, before it starts anything, so that a refusal comes early. Every router does it again when it
starts, because an application that a cluster deploys by itself has no launcher.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from ...adapters.adapter import MODULES, NARROW_MODULES, SHARED_MODULES, BaseIdentity
from ...adapters.registry.registry import Registry, connect
from ...adapters.store.store import AdapterStore
from ...workers.models.config import ModelConfig
from ..config import MotetConfig
from ..settings.setting_field import ConfigError

# A base's identity, from its files, without reading all of them.

NUM_SAMPLES = 64  # of each file
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20  # as the format has it


def identify_base(folder: Path, name: str) -> BaseIdentity:
    """Equal fingerprints mean: the same shape, the same weight files by name and size, and the same weights.

    Of each weight file the header is read, and samples all over the file: training the model further or again changes
    these. Raises ValueError for a model that cannot be served.
    """
    config = ModelConfig.from_folder(folder)
    described = _described_modules(config)
    facts = {
        "family": config.family.name,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "modules": {module: list(sides) for module, sides in config.shape.modules.items() if module in described},
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    hasher = sha256(b"motet base 1\n" + json.dumps(facts, sort_keys=True).encode() + b"\n")
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        hasher.update(json.dumps([path.name, num_bytes]).encode() + b"\n")
        with path.open("rb") as file:
            for part in _parts(file, num_bytes):
                hasher.update(sha256(part).digest())
    return BaseIdentity(hasher.hexdigest(), name)


def _described_modules(config: ModelConfig) -> set[str]:
    """Of a base with experts those whose LoRA was served first, so that stores of earlier versions stay its own."""
    modules = set(config.shape.modules)
    return modules if config.experts is None else modules.difference(MODULES[4:], SHARED_MODULES, NARROW_MODULES)


def _parts(file: BinaryIO, num_bytes: int) -> list[bytes]:
    """The header, and samples of what follows it."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(min(header_bytes, MAX_HEADER_BYTES))
    start = 8 + len(header)
    step = max((num_bytes - start) // NUM_SAMPLES, SAMPLE_BYTES)
    parts = [header]
    for position in range(start, num_bytes, step):
        file.seek(position)
        parts.append(file.read(SAMPLE_BYTES))
    return parts


OWNER_FILE = "launch_id"  # in the data folder
OTHER_FOLDER = "choose another folder with --data-dir"
OTHER_REDIS = "set REDIS_URL to another server, or to another database of this one (redis://HOST:PORT/1)"


async def register_launch(config: MotetConfig, *, embedded_redis: bool) -> None:
    """Claims store and registry for this base; the config's keys replace those of this folder's earlier launches.

    Raises OtherLayout, OtherBase, KeyTaken, RegistryUnavailable, ConfigError if the base's name is an adapter's or a
    tenant with a latency objective has no key; then no data of another launch has changed.
    """
    async with _registry(config) as registry:
        # An embedded registry has no other user: while it is empty it may change hands.
        remedy = OTHER_FOLDER if embedded_redis else OTHER_REDIS
        await _claim(registry, config, remedy, if_empty=embedded_redis)
        await _check_objectives(registry, config, _owner(config), config.access.keys)
        await registry.set_launch_keys(_owner(config), config.access.keys)


async def register_router(
    registry: Registry, config: MotetConfig, owner: str, keys: Sequence[tuple[str, str]] | None
) -> None:
    """What each router makes sure of before it serves, and raises as `register_launch`. Any number do so at once.

    `owner`: the launch that this router belongs to. `keys`: all that this launch gives, in place of those that it gave
    before; None: its routers give none. Keys that other launches give stay.
    """
    await _claim(registry, config, OTHER_REDIS, if_empty=False)
    await _check_objectives(registry, config, owner, keys or ())
    await registry.stored.count_once()
    if keys is not None:
        await registry.set_launch_keys(owner, keys)


async def check_objectives_of(registry: Registry, config: MotetConfig) -> None:
    """Raises ConfigError for a latency objective of a tenant without a key, in any launch."""
    await _check_objectives(registry, config, "", ())


async def forget_launch_keys(config: MotetConfig) -> None:
    """Deletes the keys that this data folder's launches gave. Raises RegistryUnavailable."""
    async with _registry(config) as registry:
        await registry.set_launch_keys(_owner(config), ())


async def check_objectives(config: MotetConfig) -> None:
    """Raises ConfigError for a latency objective of a tenant that has no key, and RegistryUnavailable."""
    async with _registry(config) as registry:
        await _check_objectives(registry, config, _owner(config), config.access.keys)


@asynccontextmanager
async def _registry(config: MotetConfig) -> AsyncIterator[Registry]:
    assert config.access.redis_url is not None
    client = connect(config.access.redis_url)
    try:
        yield Registry(client)
    finally:
        await client.aclose()


async def _claim(registry: Registry, config: MotetConfig, remedy: str, *, if_empty: bool) -> None:
    """Store and registry are this base's, before and after. No other base's have changed if it raises."""
    base = await asyncio.to_thread(identify_base, config.model_path, config.serving.name)
    store = AdapterStore(config.store_path)
    store.check_base(base, OTHER_FOLDER)
    await registry.claim_layout()
    await registry.claim_base(base, remedy, if_empty=if_empty)
    store.claim_base(base, OTHER_FOLDER)
    await _check_name(registry, base)


async def _check_name(registry: Registry, base: BaseIdentity) -> None:
    """Raises ConfigError if an adapter has the base's name: requests could not reach that adapter any more."""
    tenants = await registry.tenants_with(base.name)
    if tenants:
        raise ConfigError(
            "--name",
            base.name,
            f"{', '.join(tenants)} has an adapter of this name; choose another with --name, or start with the former "
            "name and delete the adapter first",
        )


async def _check_objectives(
    registry: Registry, config: MotetConfig, owner: str, keys: Sequence[tuple[str, str]]
) -> None:
    tenants = {tenant for tenant, _ in keys}
    unknown = [(tenant, seconds) for tenant, seconds in config.batching.latency_objectives_s if tenant not in tenants]
    if not unknown:
        return
    tenants |= await registry.tenants_besides(owner)
    for tenant, seconds in unknown:
        if tenant not in tenants:
            names = ", ".join(sorted(tenants)) or "none"
            accepted = f"there is no tenant {tenant}; those with a key are: {names}"
            raise ConfigError("--latency-objective", f"{tenant}={seconds:g}", accepted)


def _owner(config: MotetConfig) -> str:
    """An id of this data folder, made at its first launch, by which its keys are known in a Redis that others share."""
    path = config.serving.data_dir / OWNER_FILE
    try:
        with path.open("x") as file:
            file.write(secrets.token_hex(16))
    except FileExistsError:
        pass
    owner = path.read_text().strip()
    if not owner.isalnum():
        raise ConfigError("--data-dir", str(config.serving.data_dir), f"its {OWNER_FILE} is damaged; delete that file")
    return owner
