"""Where the application asks Ray Serve to place gangs and routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.cluster.application.application_config import live_values
from motet.cluster.config import MotetConfig
from motet.cluster.replicas.application import build_application
from motet.cluster.settings.setting_field import Part, fields_of
from motet.cluster.settings.settings import Settings

LIVE = [field.name for field in fields_of(Settings) if field.mark.change == "live"]
# What a setting becomes that one more does not suit.
OTHERS = {
    "control_tokens": "nowhere",
    "response_template": "none",
    "adapter_base": "match",
    "sampling_defaults": "openai",
    "vision_lora": "leave-out",
    "unknown_adapter_fields": "warn",
    "base_aliases": "mirror",
    "kv_host_bytes": 1 << 20,
    "access_log": False,
    "cors_origins": "https://chat.example.com",
    "adapter_folders": "/adapters",
    "tenant_queue_share": 0.25,
    "scheduling": "fifo",
    "nano_batches": "off",
    "tenant_scaling_share": 0.25,
    "max_body_bytes": 1 << 20,
    "tenant_running_share": 0.25,
    "max_model_len": 100,
    "prefix_cache": False,
    "latency_objectives_s": (("acme", 1.0),),
    "num_threads": 2,
    "pool_bytes": 1 << 28,
    "max_num_sequences": 7,
    "max_tokens_per_step": 700,
    "device_memory_share": 0.5,
    "token_interval_s": 0.5,
    "queued_tokens_per_gang": 7777,
    "pool_pressure": 0.5,
}
LIVE_IN = {field.name: field.mark.live_in for field in fields_of(Settings) if field.mark.live_in is not None}
PARTS: tuple[Part, ...] = ("router", "gang")
BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
DEFAULTS = MotetConfig.of(model_path=BASE, data_dir=BASE)
MIG = "nvidia.com/mig-1g.10gb"


def deployments(**given: Any) -> tuple[Any, Any]:
    """The deployments of the routers and of the gangs."""
    routers = build_application(MotetConfig.of(model_path=BASE, data_dir=BASE, **given), Path("secrets"))
    (gangs,) = (argument for argument in routers._bound_deployment.init_args if hasattr(argument, "_bound_deployment"))
    return routers._bound_deployment, gangs._bound_deployment


def test_a_gang_of_one_is_placed_as_its_replica() -> None:
    routers, gangs = deployments(
        gang_num_gpus=0.5,
        pool_bytes=1 << 30,
        gang_resources=((MIG, 1.0),),
        gang_labels=(("zone", "east"),),
        router_resources=(("front", 1.0),),
    )
    assert gangs.ray_actor_options == {
        "num_cpus": 1.0,
        "num_gpus": 0.5,
        "resources": {MIG: 1.0},
        "label_selector": {"zone": "east"},
    }
    assert gangs._replica_config.placement_group_bundles is None
    assert routers.ray_actor_options == {"num_cpus": 0, "resources": {"front": 1.0}}


def test_a_gang_of_several_has_a_bundle_for_each() -> None:
    _, gangs = deployments(
        tensor_parallel=2, gang_num_gpus=1.0, strategy="spread", gang_labels=(("zone", "east"),), gang_num_cpus=2.0
    )
    worker = {"CPU": 2.0, "GPU": 1.0}
    assert gangs._replica_config.placement_group_bundles == [{"CPU": 0.1}, worker, worker]
    assert gangs._replica_config.placement_group_strategy == "SPREAD"
    assert gangs._replica_config.placement_group_bundle_label_selector == [{"zone": "east"}] * 3
    assert gangs.ray_actor_options["num_cpus"] == 0.1


def test_a_gang_is_on_one_node_unless_requested() -> None:
    _, gangs = deployments(tensor_parallel=2)
    assert gangs._replica_config.placement_group_strategy == "STRICT_PACK"
    assert gangs._replica_config.placement_group_bundle_label_selector is None


@pytest.mark.parametrize("name", LIVE)
def test_an_update_of_a_live_setting_acts(name: str) -> None:
    """On gangs or routers: another version replaces them, and other options are Serve's to take over."""
    given = {"device": "cpu", "num_threads": 1, "max_gangs": 3, "kv_disk_bytes": 1 << 20}
    running = MotetConfig.of(model_path=BASE, data_dir=BASE, **given)
    other = OTHERS[name] if name in OTHERS else running.value(name) + 1

    def acting(**changed: Any) -> list[tuple[str, str]]:
        both = deployments(**(given | changed))
        return [(one.version, repr(one._deployment_config)) for one in both]

    assert acting() == acting()
    assert acting(**{name: other}) != acting()


@pytest.mark.parametrize("name", LIVE_IN)
def test_what_replicas_take_over_replaces_none(name: str) -> None:
    """They get it at once, and those that are started later have it from the beginning."""
    part = LIVE_IN[name]
    changed: dict[str, Any] = {name: OTHERS[name] if name in OTHERS else DEFAULTS.value(name) + 1}
    before, after = dict(zip(PARTS, deployments(), strict=True)), dict(zip(PARTS, deployments(**changed), strict=True))
    assert [before[one].version for one in PARTS] == [after[one].version for one in PARTS]
    assert live_values(part, after[part].user_config)[name] == changed[name]
    assert live_values(part, before[part].user_config)[name] == DEFAULTS.value(name)
    other = next(one for one in PARTS if one != part)
    assert before[other].user_config == after[other].user_config
    assert repr(before[part].init_args) != repr(after[part].init_args)


def test_a_new_size_of_the_pool_replaces_gangs_and_no_router() -> None:
    before, after = deployments(), deployments(host_bytes=9)
    assert before[0].version == after[0].version
    assert before[1].version != after[1].version
    assert after[1].init_args[0].host_bytes == 9


def test_more_gangs_that_share_the_cores_as_before_replace_none() -> None:
    before, after = deployments(), deployments(max_gangs=2, gangs_beside=1)
    assert before[1].version == after[1].version


def test_a_larger_upload_replaces_routers_and_no_gang() -> None:
    before, after = deployments(), deployments(max_upload_bytes=1 << 20)
    assert before[0].version != after[0].version
    assert before[1].version == after[1].version
