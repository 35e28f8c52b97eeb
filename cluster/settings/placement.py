"""Settings: where routers and gangs run, and what they take of their nodes."""

from __future__ import annotations

from typing import Annotated

from ...workers.config import ExpertSharding
from ..resources import Placement as Strategy
from ..resources import why_not_custom, why_not_labels, why_not_num_gpus
from .setting import Amount, Count, Pairs, Refusal, Setting, Unit
from .setting_field import SettingGroup

Amounts = tuple[tuple[str, float], ...]
Labels = tuple[tuple[str, str], ...]
RESOURCE = Pairs(
    "NAME=AMOUNT", example="nvidia.com/mig-1g.10gb=1", split_last=True
)  # names of MIG slices hold slashes and dots


def check_num_gpus(num_gpus: float) -> Refusal | None:
    return None if (accepted := why_not_num_gpus(num_gpus)) is None else (num_gpus, accepted)


def check_resources(resources: Amounts) -> Refusal | None:
    return None if (problem := why_not_custom(resources)) is None else (resources, problem)


def check_labels(labels: Labels) -> Refusal | None:
    return None if (problem := why_not_labels(labels)) is None else (labels, problem)


def check_address(address: str | None) -> Refusal | None:
    if address is None or address == "auto":
        return None
    if address.startswith("ray://"):
        return (
            address,
            "Ray Client is not supported, as motet must be on a node of the cluster: run motet serve there, with "
            "auto or HOST:PORT of the head (6379 unless it was started with another --port)",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        return address, "auto or HOST:PORT of the head of a running Ray cluster is accepted"
    return None


class Placement(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement."""

    address: Annotated[
        str | None,
        Unit("HOST:PORT|auto", "auto or HOST:PORT of the head of a running Ray cluster"),
        Setting(
            "Serve on a running Ray cluster of which this machine is a node: its head's HOST:PORT, or auto to find it.",
            unset="a private cluster on this machine",
            check=check_address,
            not_in_args="the application serves on the cluster that runs it",
        ),
    ] = None
    num_routers: Annotated[Count, Setting("HTTP fronts, spread over the nodes.")] = 1
    tensor_parallel: Annotated[Count, Setting("Workers of a gang, which hold one copy of the base together.")] = 1
    expert_sharding: Annotated[
        ExpertSharding,
        Setting("How the workers of a gang divide a mixture of experts: the features of each expert, or the experts."),
    ] = "tensor"
    gang_num_cpus: Annotated[Amount, Setting("Ray's CPUs for each worker of a gang.")] = 1.0
    gang_num_gpus: Annotated[
        Amount,
        Setting(
            "Ray's GPUs for each worker; in a gang of one worker also a share of a GPU, which needs --pool-bytes. On "
            "this machine 0 means one GPU if there is any.",
            check=check_num_gpus,
        ),
    ] = 0.0
    gang_resources: Annotated[
        Amounts,
        RESOURCE,
        Setting(
            "A custom resource of Ray that each worker of a gang needs.", flags=("resource",), check=check_resources
        ),
    ] = ()
    gang_labels: Annotated[
        Labels,
        Pairs("KEY=VALUE", example="accelerator=l4"),
        Setting("A label that the nodes of a gang must have.", flags=("node-label",), check=check_labels),
    ] = ()
    strategy: Annotated[
        Strategy,
        Setting(
            "Which nodes the workers of a gang run on: all on one node, on as few nodes as possible, or on as many.",
            flags=("placement",),
        ),
    ] = "strict-pack"
    router_resources: Annotated[
        Amounts,
        RESOURCE,
        Setting("A custom resource of Ray that each router needs.", flags=("router-resource",), check=check_resources),
    ] = ()
