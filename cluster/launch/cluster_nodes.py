"""The nodes of a running Ray cluster: whether motet has room there, and whether they are fit for it."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ... import __version__
from ...adapters.registry.registry_keys import PREFIX
from ...workers.device_probe import probe_counted_device, probe_device
from ..application.registration import identify_base
from ..config import MotetConfig
from ..resources import Placement
from ..settings.setting_field import format_byte_size
from ..worker_device import WorkerDevice

# Whether gangs have room on a cluster's nodes: pure functions of what the nodes have and what is wanted.
#
# Ray waits forever for a place that no node has. So motet checks first, and reports what is missing.

ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node, with all its resources or with its free ones: the caller decides."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Demand:
    """What one gang takes, or one router, which has one bundle."""

    part: str  # "gang"
    bundles: tuple[Mapping[str, float], ...]  # first the leader's, if it has one, then the workers'
    labels: Mapping[str, str]  # that each of its nodes must have
    placement: Placement

    @property
    def sum(self) -> dict[str, float]:
        return dict(sum((Counter(bundle) for bundle in self.bundles), Counter()))


def places(demand: Demand, nodes: Sequence[Node], limit: int) -> int:
    """How many such demands have room at once, counted up to `limit`.

    >>> nodes = [Node(name="a", resources={"GPU": 3}, labels={}), Node(name="b", resources={"GPU": 1}, labels={})]
    >>> gang = Demand("gang", ({"GPU": 1},) * 2, {}, "strict-pack")
    >>> places(gang, nodes, 10), places(Demand("gang", gang.bundles, {}, "pack"), nodes, 10)
    (1, 2)
    """
    eligible = [node for node in nodes if has_labels(node, demand)]
    if demand.placement == "strict-pack":
        return min(limit, sum(_times(demand.sum, node.resources) for node in eligible))
    for number in range(limit, 0, -1):
        # Large bundles first: small ones still fit into what is left, on whichever nodes that is.
        bundles = sorted(demand.bundles * number, key=lambda bundle: (len(bundle), sum(bundle.values())), reverse=True)
        if _fit(bundles, [dict(node.resources) for node in eligible]):
            return number
    return 0


def why_no_place(demand: Demand, number: int, nodes: Sequence[Node]) -> str | None:
    """A sentence that says what is missing for `number` of these at once; None: nothing."""
    num_places = places(demand, nodes, number)
    if num_places >= number:
        return None
    needs = describe(demand)
    if nodes and not any(has_labels(node, demand) for node in nodes):
        labels = ", ".join(f"{key}={value}" for key, value in demand.labels.items())
        return f"no node has the labels {labels}. {_describe_nodes(nodes, demand)}"
    if num_places:
        return f"the nodes have room for {num_places} of {number}, and {needs}. {_describe_nodes(nodes, demand)}"
    return f"no node has room: {needs}. {_describe_nodes(nodes, demand)}"


def can_host(demand: Demand, node: Node) -> bool:
    """Whether the node could hold at least one bundle of the demand."""
    return has_labels(node, demand) and any(_times(bundle, node.resources) for bundle in demand.bundles)


def has_labels(node: Node, demand: Demand) -> bool:
    return all(node.labels.get(key) == value for key, value in demand.labels.items())


def describe(demand: Demand) -> str:
    """A sentence that says what the demand takes, and whether all on one node.

    >>> describe(Demand("gang", ({"CPU": 1, "GPU": 1},) * 2, {}, "strict-pack"))
    'a gang takes 2 CPU, 2 GPU of one node'
    """
    if len(demand.bundles) == 1 or demand.placement == "strict-pack":
        where = "" if len(demand.bundles) == 1 else " of one node"
        return f"a {demand.part} takes {_amounts(demand.sum)}{where}"
    bundles = "; ".join(_amounts(bundle) for bundle in demand.bundles)
    return f"a {demand.part} takes, each on one node: {bundles}"


def _describe_nodes(nodes: Sequence[Node], demand: Demand) -> str:
    names = sorted({name for bundle in demand.bundles for name in bundle}, key=lambda name: (name not in "CPU", name))
    descriptions = []
    for node in nodes:
        has = _amounts({name: node.resources.get(name, 0.0) for name in names})
        labels = "".join(f", {key}={node.labels.get(key, 'none')}" for key in demand.labels)
        descriptions.append(f"{node.name} has {has}{labels}")
    return "; ".join(descriptions) or "there is no node"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items()) or "nothing"


def _times(demand: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How often the demand goes into the resources; a demand of nothing goes without end."""
    if not demand:
        return sys.maxsize
    return min(int((resources.get(name, 0.0) + ROUNDING) / amount) for name, amount in demand.items())


def _fit(bundles: Iterable[Mapping[str, float]], free: list[dict[str, float]]) -> bool:
    """First fit; `free` is used up."""
    for bundle in bundles:
        node = next((node for node in free if _times(bundle, node)), None)
        if node is None:
            return False
        for name, amount in bundle.items():
            node[name] -= amount
    return True


# What a node of a running cluster must have before a part of motet can live on it, checked on the node itself.

REDIS_TIMEOUT_S = 5.0
_SET = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])"  # also where Redis is full


@dataclass(frozen=True, kw_only=True)
class NodeExpectations:
    """What a node must find. Plain data, because it travels to the node."""

    version: str  # of motet
    model_path: Path
    fingerprint: str  # of the base there
    marker_path: Path  # a file in the data folder, made for this check
    marker: str  # what it says
    redis_url: str
    redis_key: str  # made for this check as well; its value is `marker`
    worker: WorkerDevice | None  # of gangs that may come there; None: none may
    num_workers: int = 0  # that have room there at once

    @contextmanager
    def prepared(self, ttl_s: int) -> Iterator[None]:
        """Makes what nodes look for, and removes it. A launch that is killed leaves the key for `ttl_s`."""
        client = _client(self.redis_url)
        try:
            self.marker_path.write_text(self.marker)
            client.eval(_SET, 1, self.redis_key, self.marker, ttl_s)
            yield
        finally:
            self.marker_path.unlink(missing_ok=True)
            with suppress(RedisError):
                client.delete(self.redis_key)
            client.close()


def problems_of_this_node(expected: NodeExpectations) -> Sequence[str]:
    """What is wrong on this node, a sentence for each problem."""
    problems = []
    if __version__ != expected.version:
        problems.append(f"motet {__version__} is installed, and {expected.version} is needed")
    try:
        fingerprint = identify_base(expected.model_path, "").fingerprint
        if fingerprint != expected.fingerprint:
            problems.append(f"the model in {expected.model_path} is another one")
    except (OSError, ValueError) as error:
        problems.append(f"the model cannot be read from {expected.model_path}: {error}")
    folder = expected.marker_path.parent
    try:
        if expected.marker_path.read_text() != expected.marker:
            problems.append(f"{folder} is another folder: all nodes must share the data folder")
    except OSError as error:
        problems.append(f"{folder} is not the data folder, which all nodes must share at the same path: {error}")
    if (problem := _redis_problem(expected)) is not None:
        problems.append(problem)
    if expected.worker is not None and (problem := _device_problem(expected.worker, expected.num_workers)) is not None:
        problems.append(problem)
    return problems


def _device_problem(worker: WorkerDevice, num_workers: int) -> str | None:
    """What keeps workers from computing here."""
    try:
        facts = (probe_counted_device if worker.gang_num_gpus else probe_device)(worker.device)
        worker.check(facts)
        worker.check_shared(facts, num_workers)
    except ValueError as error:
        return f"a gang could not start there: {error}"
    if facts.memory_bytes is None:
        memory_bytes, subject, num_pools = psutil.virtual_memory().total, "it has", 1
        pool_bytes = worker.pool_bytes or 0  # None: a share
    else:
        memory_bytes, subject, num_pools = facts.memory_bytes, "a GPU of it has", worker.num_pools_on_a_gpu(num_workers)
        pool_bytes = worker.pool_bytes or 0  # None: what is left
    if pool_bytes * num_pools > memory_bytes:
        pools = "the pool of one worker" if num_pools == 1 else f"the pools of the {num_pools} workers that share it"
        return f"{subject} {format_byte_size(memory_bytes)} of memory, less than {pools}"
    return None


def _redis_problem(expected: NodeExpectations) -> str | None:
    client = _client(expected.redis_url)
    try:
        if client.get(expected.redis_key) != expected.marker:
            return (
                "what answers at the address of the Redis server is another one: give an address that all nodes reach"
            )
    except RedisError as error:
        return f"the Redis server cannot be reached: {error}"
    finally:
        client.close()
    return None


def _client(url: str) -> Redis:
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    return client


CHECK_TIMEOUT_S = 300.0  # of all nodes together; each may start processes first, and load torch from a cold disk
MARKER_TTL_S = 600


class CannotJoin(Exception):  # noqa: N818
    """The cluster cannot be used in its present state; the message says why and what would help."""


def check_room(config: MotetConfig) -> None:
    """Raises CannotJoin if the nodes could not hold the first gangs and the routers even if they were empty."""
    nodes = alive_nodes()
    if config.placement.address is None:
        remedy = "Ask for less, or start a cluster of several machines and give its --address"
    else:
        remedy = "Start nodes that have it, ask for less, or, where the cluster grows by itself, add --wait-for-nodes"
    for demand, number in demands(config):
        if (problem := why_no_place(demand, number, nodes)) is not None:
            raise CannotJoin(f"{number} {demand.part}{'s' * (number > 1)} cannot be placed: {problem}. {remedy}")


def room_taken(config: MotetConfig) -> list[str]:
    """A warning for each part of motet that does not fit into what others leave free at the moment."""
    nodes = free_nodes()
    problems = [(demand, why_no_place(demand, number, nodes)) for demand, number in demands(config)]
    return [
        f"a {demand.part} must wait for others to leave: of what is free now, {problem}"
        for demand, problem in problems
        if problem
    ]


def check_nodes(config: MotetConfig) -> None:
    """Has every node that may get a part of motet check itself. Raises CannotJoin with all that is wrong."""
    assert config.access.redis_url is not None
    all_demands = [demand for demand, _ in demands(config)]
    hosts = [node for node in alive_nodes() if any(can_host(demand, node) for demand in all_demands)]
    rooms = [room_for_workers(config, node) for node in hosts]
    marker = secrets.token_hex(8)
    expected = NodeExpectations(
        version=__version__,
        model_path=config.model_path,
        fingerprint=identify_base(config.model_path, config.serving.name).fingerprint,
        marker_path=config.serving.data_dir / f"joining-{marker}",
        marker=marker,
        redis_url=config.access.redis_url,
        redis_key=f"{PREFIX}joining:{marker}",
        worker=None,
    )
    of_each = [replace(expected, worker=config.worker_device if room else None, num_workers=room) for room in rooms]
    with expected.prepared(MARKER_TTL_S):
        problems = _examine_nodes(hosts, of_each)
    if problems:
        raise CannotJoin("the cluster is not ready for motet:\n" + "\n".join(f"- {line}" for line in problems))


def demands(config: MotetConfig) -> list[tuple[Demand, int]]:
    """The gangs and the routers that must have room at the start: what one takes, and how many there are."""
    placement = config.placement
    gang = Demand("gang", config.gang_bundles, dict(placement.gang_labels), placement.strategy)
    router = Demand("router", (dict(placement.router_resources),), {}, "strict-pack")
    return [(gang, max(1, config.scaling.min_gangs)), (router, placement.num_routers)]


def room_for_workers(config: MotetConfig, node: Node) -> int:
    """How many workers of gangs the node could hold at once, if it were empty."""
    worker = Demand("worker", config.gang_bundles[-1:], dict(config.placement.gang_labels), "strict-pack")
    return places(worker, [node], config.scaling_policy.max_gangs * config.placement.tensor_parallel)


def alive_nodes() -> list[Node]:
    """Living nodes with all their resources."""
    return [_node(node, node["Resources"]) for node in _ray_nodes()]


def addresses_of_nodes() -> dict[str, str]:
    """Addresses of living nodes, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _ray_nodes()}


def free_nodes() -> list[Node]:
    """Living nodes with their free resources."""
    # Ray has no public call for the free resources of each node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [_node(node, free.get(node["NodeID"], {})) for node in _ray_nodes()]


def _ray_nodes() -> list[Mapping[str, Any]]:
    import ray

    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))


def _node(node: Mapping[str, Any], resources: Mapping[str, float]) -> Node:
    labels = {**(node.get("Labels") or {}), "ray.io/node-id": node["NodeID"]}
    return Node(name=node["NodeManagerAddress"], resources=dict(resources), labels=labels)


def _examine_nodes(nodes: Sequence[Node], of_each: Sequence[NodeExpectations]) -> list[str]:
    """The problems of all nodes, each after its node's name. A node without an answer is a problem, too."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(problems_of_this_node)
    calls = [
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.labels["ray.io/node-id"], soft=False),
        ).remote(expected)
        for node, expected in zip(nodes, of_each, strict=True)
    ]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=CHECK_TIMEOUT_S)
    problems = []
    for node, answer in zip(nodes, calls, strict=True):
        if answer not in done:
            problems.append(f"{node.name}: it did not answer within {CHECK_TIMEOUT_S:g} s")
            continue
        try:
            problems += [f"{node.name}: {problem}" for problem in ray.get(answer)]
        except ray.exceptions.RayError as error:
            problems.append(f"{node.name}: {_cause(error)}")
    return problems


def _cause(error: Exception) -> str:
    text = str(error)
    if "No module named 'motet'" in text:
        return "motet is not installed there"
    if "No module named 'motet." in text or "AttributeError" in text:
        return f"another version of motet is installed there, and {__version__} is needed"
    return "it could not be checked: " + next((line for line in reversed(text.splitlines()) if line.strip()), text)
