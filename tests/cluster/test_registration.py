"""What one launch leaves in a real Redis for the next."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file

from motet.adapters.errors import KeyTaken, OtherBase
from motet.adapters.format.validation import validate
from motet.adapters.registry import registry_keys
from motet.adapters.registry.registry import OtherLayout, Registry
from motet.adapters.store.store import AdapterStore
from motet.cluster.application.registration import OWNER_FILE, check_objectives, forget_launch_keys, register_launch
from motet.cluster.config import MotetConfig
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.given_keys import give_key, tenant_of_key
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, lora_files

DEMO_BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> MotetConfig:
    return config_of(tmp_path / "data", redis_url)


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


@pytest.fixture
def other_base(tmp_path: Path) -> Path:
    """A base with the demo's name and other weights, as after another training."""
    folder = Path(shutil.copytree(DEMO_BASE, tmp_path / "base"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(data_dir: Path, redis_url: str, *keys: tuple[str, str]) -> MotetConfig:
    data_dir.mkdir()
    return MotetConfig.of(model_path=DEMO_BASE, data_dir=data_dir, redis_url=redis_url, keys=keys)


async def upload(registry: Registry, name: str = "pirate") -> None:
    await registry.names.register("acme", name, digest="a" * 64, module_ranks={"q_proj": 8}, num_bytes=1000)


async def launch(config: MotetConfig, *keys: tuple[str, str], embedded_redis: bool = True) -> None:
    await register_launch(config.replaced(keys=keys), embedded_redis=embedded_redis)


async def test_keys_of_the_launch_before_are_gone(config: MotetConfig, registry: Registry) -> None:
    await give_key(registry, "acme", "for good")
    await launch(config, ("acme", "old"))
    await launch(config, ("acme", "new"))
    assert {tenant async for page in registry.scan_keys() for _, tenant in page} == {"acme"}
    assert [await tenant_of_key(registry, key) for key in ("for good", "old", "new")] == ["acme", None, "acme"]
    await forget_launch_keys(config)
    assert [await tenant_of_key(registry, key) for key in ("for good", "old", "new")] == ["acme", None, None]


async def test_data_folders_that_share_a_redis_have_launches_of_their_own(
    config: MotetConfig, registry: Registry, tmp_path: Path, redis_url: str
) -> None:
    other = config_of(tmp_path / "other", redis_url)
    await launch(config, ("acme", "mine"))
    await launch(other, ("acme", "yours"))
    await launch(config)
    assert [await tenant_of_key(registry, key) for key in ("mine", "yours")] == [None, "acme"]
    with pytest.raises(KeyTaken):
        await launch(config, ("zoo", "yours"))


async def test_an_objective_is_for_a_tenant_with_a_key(
    config: MotetConfig, registry: Registry, tmp_path: Path, redis_url: str
) -> None:
    hasty = config.replaced(latency_objectives_s=(("acme", 2.0),))
    problem = r"--latency-objective = 'acme=2': there is no tenant acme; those with a key are: zoo$"
    await launch(config, ("acme", "old"))
    with pytest.raises(ConfigError, match=problem):  # its key goes with the launch before
        await launch(hasty, ("zoo", "new"))
    assert [await tenant_of_key(registry, key) for key in ("old", "new")] == ["acme", None]
    await launch(hasty, ("acme", "mine"), ("zoo", "new"))
    other = config_of(tmp_path / "other", redis_url).replaced(latency_objectives_s=hasty.batching.latency_objectives_s)
    await launch(other)  # another data folder's launch gave it one
    await check_objectives(other)
    with pytest.raises(ConfigError, match=r"no tenant absent; those with a key are: acme, zoo$"):
        await check_objectives(other.replaced(latency_objectives_s=(("absent", 2.0),)))
    await forget_launch_keys(config)
    with pytest.raises(ConfigError, match=r"no tenant acme; those with a key are: none$"):
        await check_objectives(other)
    await give_key(registry, "acme", "for good")
    await check_objectives(other)


async def test_a_damaged_owner_is_reported(config: MotetConfig) -> None:
    (config.serving.data_dir / OWNER_FILE).write_text("")
    with pytest.raises(ConfigError, match=OWNER_FILE):
        await launch(config)


async def test_another_base_is_refused_once_there_are_adapters(
    config: MotetConfig, registry: Registry, other_base: Path
) -> None:
    other = config.replaced(model_path=other_base, name="base")
    await launch(config)
    await launch(other)  # there is no adapter yet
    await launch(config)
    await upload(registry)
    await launch(config, ("acme", "key"))
    with pytest.raises(OtherBase, match=r"trained again.*--data-dir"):
        await launch(other, ("acme", "another"))
    assert await tenant_of_key(registry, "key") == "acme"
    assert await tenant_of_key(registry, "another") is None


async def test_a_redis_of_others_is_never_taken_over(
    config: MotetConfig, registry: Registry, other_base: Path, tmp_path: Path, redis_url: str
) -> None:
    """The launch that claimed the registry may be about to upload."""
    await launch(config, embedded_redis=False)
    other = config_of(tmp_path / "other", redis_url).replaced(model_path=other_base)
    with pytest.raises(OtherBase, match="REDIS_URL"):
        await launch(other, embedded_redis=False)
    await launch(config, embedded_redis=False)


async def test_a_registry_of_a_later_layout_is_refused_and_stays(config: MotetConfig, redis_client: Redis) -> None:
    await redis_client.set(registry_keys.LAYOUT, "2 77.3.0")
    with pytest.raises(OtherLayout, match=r"needs motet 77\.3\.0"):
        await launch(config)
    assert await redis_client.keys() == [registry_keys.LAYOUT]
    assert await redis_client.get(registry_keys.LAYOUT) == "2 77.3.0"


async def test_a_data_folder_of_another_base_is_refused_before_redis_is_touched(
    config: MotetConfig, registry: Registry, redis_client: Redis, other_base: Path, tmp_path: Path
) -> None:
    await launch(config)
    files = lora_files()
    AdapterStore(config.store_path).put(validate(files.config_bytes, files.write(tmp_path), SHAPE), [LAYOUT])
    await redis_client.flushall()
    with pytest.raises(OtherBase, match=f"{config.serving.data_dir}.*--data-dir"):
        await launch(config.replaced(model_path=other_base))
    assert await redis_client.dbsize() == 0


async def test_a_base_cannot_take_an_adapters_name(config: MotetConfig, registry: Registry) -> None:
    await launch(config)
    await upload(registry, "pirate")
    with pytest.raises(ConfigError, match=r"acme has an adapter of this name.*--name"):
        await launch(config.replaced(name="pirate"), ("acme", "key"))
    assert await tenant_of_key(registry, "key") is None
    await launch(config.replaced(name="captain"))
