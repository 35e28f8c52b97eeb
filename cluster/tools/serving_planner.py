"""Plans the devices and the gangs' degree for a load with objectives, tries plans on traces, and reports them."""

from __future__ import annotations

import html
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, sqrt
from pathlib import Path
from statistics import quantiles
from typing import Any

from ...adapters.store.store import AdapterStore
from ...workers.config import EngineConfig
from ...workers.costs.device_costs import DeviceCosts
from ...workers.costs.devices import Device
from ...workers.costs.measured_steps import RecordingExecutor, costs_of, load_each, random_adapters, record_loads
from ...workers.costs.replay import PlanCosts, Replayed, TracedRequest, VirtualExecutor, replay
from ...workers.costs.step_costs import StepCosts
from ...workers.costs.step_defaults import cpu_pool_bytes
from ...workers.engine_builder import build_engine, build_virtual_engine
from ...workers.machine_memory import usable_memory_bytes
from ...workers.models.config import ModelConfig
from ...workers.models.sharding import ModelSharding
from ...workers.wire.messages import AdapterRef
from ..config import MotetConfig
from ..settings.setting_field import format_byte_size
from .gang_capacity import BLOCK_SIZE, GangCapacity, GangState, Objectives, Traffic

_MORE = 1.1  # times each resource, in `gains`
_HOST_SPARE = 1.05  # times the adapters' size, of host memory
MAX_GANGS = 10_000


@dataclass(frozen=True)
class GangPlace:
    """Where a gang is placed: devices of one node."""

    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ServingPlan:
    """Gangs of one kind that serve a load."""

    gang: GangCapacity
    num_gangs: int
    peak: GangState  # of a gang at its highest load
    state: GangState  # of a gang with its share of the load
    devices_per_node: int
    price_per_hour: float | None = None  # of a device

    @property
    def degree(self) -> int:
        return self.gang.degree

    @property
    def num_devices(self) -> int:
        return self.num_gangs * self.degree

    @cached_property
    def places(self) -> tuple[GangPlace, ...]:
        """The place of each gang. Gangs are not split between nodes."""
        per_node = self.devices_per_node // self.degree
        return tuple(
            GangPlace(number // per_node, tuple(range(first, first + self.degree)))
            for number in range(self.num_gangs)
            for first in [number % per_node * self.degree]
        )

    @property
    def host_bytes(self) -> int:
        """Host memory of each worker, for all adapters."""
        adapters = self.gang.traffic.adapters
        return ceil(_HOST_SPARE * len(adapters.shares) * self.gang.adapter_bytes / self.degree)

    @property
    def pool_bytes(self) -> int:
        """The pool of each worker: what is left on its device."""
        return int(self.gang.pool_bytes / self.degree)

    @property
    def max_num_sequences(self) -> int:
        """The number of sequences that is hardly ever exceeded."""
        return max(1, ceil(self.peak.num_sequences + 2 * sqrt(self.peak.num_sequences)))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of motet, without the pool, which a worker sizes by the memory that is left."""
        gang_settings: dict[str, Any] = {
            "gang-num-gpus": 1,
            "tensor-parallel": self.degree,
            "min-gangs": self.num_gangs,
            "max-gangs": self.num_gangs,
            "max-num-sequences": self.max_num_sequences,
            "max-tokens-per-step": self.gang.max_tokens_per_step,
        }
        return gang_settings | ({"host-bytes": self.host_bytes} if self.gang.traffic.adapters.shares else {})

    @property
    def price_per_s(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.num_devices / 3600

    def price_of_million(self, tokens_per_request: float) -> float | None:
        """With this number of tokens of each request, and the load as it is."""
        if self.price_per_s is None:
            return None
        return 1e6 * self.price_per_s / (self.gang.traffic.requests_per_s * tokens_per_request)

    def gains(self) -> Iterator[tuple[str, float]]:
        """How much more a gang serves with 10 % more of each resource, or with looser objectives."""
        gang, device, objectives = self.gang, self.gang.device, self.gang.objectives
        network = device.network_bytes_per_s
        changed = {
            "compute": replace(gang, device=replace(device, flops_per_s=_MORE * device.flops_per_s)),
            "memory bandwidth": replace(gang, device=replace(device, bytes_per_s=_MORE * device.bytes_per_s)),
            "memory": replace(gang, device=replace(device, memory_bytes=_MORE * device.memory_bytes)),
            "network": replace(gang, device=replace(device, network_bytes_per_s=network and _MORE * network)),
            "host link": replace(gang, host_bytes_per_s=_MORE * gang.host_bytes_per_s),
            "token interval": replace(
                gang, objectives=replace(objectives, token_interval_s=_MORE * objectives.token_interval_s)
            ),
            "first token": replace(
                gang, objectives=replace(objectives, first_token_s=_MORE * objectives.first_token_s)
            ),
        }
        for name, other in changed.items():
            state = other.highest_load()
            assert state is not None, "more of a resource never serves less"
            yield name, state.requests_per_s / self.peak.requests_per_s - 1


def options(
    model: ModelConfig,
    device: Device,
    traffic: Traffic,
    objectives: Objectives,
    devices_per_node: int = 8,
    price_per_hour: float | None = None,
    **of_gang: Any,
) -> tuple[tuple[ServingPlan, ...], Mapping[int, str]]:
    """A plan for each degree that can serve the load, the fewest devices first; and why the other degrees cannot."""
    if devices_per_node < 1 or (price_per_hour is not None and price_per_hour < 0):
        raise ValueError(
            f"{devices_per_node} devices a node at {price_per_hour}: at least 1 device and a price of 0 are accepted"
        )
    plans, refused = [], dict[int, str]()
    degree = 1
    while degree <= devices_per_node:
        try:
            gang = GangCapacity(model, device, degree, traffic, objectives, **of_gang)
            if (peak := gang.highest_load()) is None:
                nothing = gang.at(1e-6)
                objective, over = nothing.limits.binding()
                raise ValueError(f"the {objective} objective is missed {over:.3g} times by a gang that is nearly idle")
            num_gangs = ceil(traffic.requests_per_s / peak.requests_per_s)
            if num_gangs > MAX_GANGS:
                raise ValueError(f"{num_gangs} gangs would be needed: at most {MAX_GANGS} are planned")
            state = gang.serving(traffic.requests_per_s / num_gangs)
            plans.append(ServingPlan(gang, num_gangs, peak, state, devices_per_node, price_per_hour))
        except ValueError as error:
            refused[degree] = str(error)
        degree *= 2
    return tuple(sorted(plans, key=lambda plan: (plan.num_devices, plan.degree))), refused


def best(plans: Sequence[ServingPlan]) -> ServingPlan:
    """The cheapest plan if all have a price, else the one with the fewest devices."""
    if all(plan.price_per_s is not None for plan in plans):
        return min(plans, key=lambda plan: (plan.price_per_s or 0.0, plan.num_devices, plan.degree))
    return min(plans, key=lambda plan: (plan.num_devices, plan.degree))


# A trace on motet's engine in virtual time: on gangs of a plan, or as this machine was measured.


def replay_on_machine(
    model_path: Path, costs: StepCosts, requests: Sequence[TracedRequest], ranks: Sequence[int], num_gangs: int = 1
) -> Replayed:
    """With measured times and motet's defaults. Raises ValueError for costs of another base."""
    if costs.model != model_path.name:
        raise ValueError(f"the costs are of {costs.model}, not of {model_path.name}")
    config = _engine_config(
        model_path,
        dtype=costs.dtype,
        pool_bytes=cpu_pool_bytes(usable_memory_bytes(), 1),
        num_threads=costs.num_threads,
    )
    refs = adapter_refs(ModelConfig.from_folder(model_path), requests, ranks)
    return _dealt(config, costs, requests, refs, num_gangs, costs.device)


def replay_on_gangs(model_path: Path, plan: ServingPlan, requests: Sequence[TracedRequest]) -> Replayed:
    """With the times of data sheets over the plan's efficiency."""
    gang = plan.gang
    config = _engine_config(
        model_path,
        dtype="bfloat16",
        pool_bytes=plan.pool_bytes,
        tensor_parallel=plan.degree,
        max_num_sequences=plan.max_num_sequences,
        max_tokens_per_step=plan.settings["max-tokens-per-step"],
        token_interval_s=gang.objectives.token_interval_s,
    )
    page_bytes = ModelSharding(gang.model, plan.degree).layout(BLOCK_SIZE, "bfloat16").page_bytes
    costs = DeviceCosts(gang.model, gang.device, plan.degree, gang.efficiency, gang.host_bytes_per_s, page_bytes)
    refs = adapter_refs(gang.model, requests, gang.traffic.adapters.ranks)
    return _dealt(config, costs, requests, refs, plan.num_gangs, "cuda")


def adapter_refs(model: ModelConfig, requests: Sequence[TracedRequest], ranks: Sequence[int]) -> dict[str, AdapterRef]:
    """Adapters of a trace, on all modules, with these ranks in turn."""
    names = dict.fromkeys(request.adapter for request in requests if request.adapter is not None)
    return {
        name: AdapterRef(name, dict.fromkeys(model.shape.modules, rank))
        for name, rank in zip(names, itertools.cycle(ranks), strict=False)
    }


def _engine_config(model_path: Path, **settings: Any) -> EngineConfig:
    return MotetConfig.of(model_path=model_path, block_size=BLOCK_SIZE, **settings).engine


def _dealt(
    config: EngineConfig,
    costs: PlanCosts,
    requests: Sequence[TracedRequest],
    refs: Mapping[str, AdapterRef],
    num_gangs: int,
    device: str,
) -> Replayed:
    """Gangs get the requests in turn; each has all adapters."""
    total = Replayed()
    for number in range(min(num_gangs, len(requests))):
        executor = VirtualExecutor(costs)
        engine = build_virtual_engine(config, executor, executor.clock, device)
        total.add(replay(engine, requests[number::num_gangs], refs, executor.clock, executor.wait))
    return total


# A plan as lines, as JSON, and as a page with pictures that needs nothing else.

_WIDTH, _HEIGHT, _MARGIN = 560, 260, 56  # of a picture
_NUM_POINTS = 60  # of a curve
_COLOURS = ("#1f6feb", "#bc4c00", "#1a7f37", "#8250df")


@dataclass(frozen=True)
class Report:
    """`plans`: by degree, the best first. `replayed`: what a trace gave on one gang or several, by its name."""

    model: str
    plans: tuple[ServingPlan, ...]
    refused: Mapping[str, str]  # by gang
    replayed: Mapping[str, Replayed]

    def lines(self) -> Iterator[str]:
        if self.plans:
            yield from _plan_lines(self.plans)
        for gang, why in self.refused.items():
            yield f"not {gang}: {why}"
        for name, replayed in self.replayed.items():
            yield ""
            yield f"the trace on {name}"
            yield from (f"  {key}: {value:.4g}" for key, value in _replayed(replayed).items() if value is not None)
            yield from (f"  refused, {count}: {why}" for why, count in replayed.refused.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plans": [_plan_json(plan) for plan in self.plans],
            "refused": dict(self.refused),
            "replayed": {
                name: _replayed(replayed) | {"refused": replayed.refused} for name, replayed in self.replayed.items()
            },
        }

    def page(self) -> str:
        """HTML with its pictures in it."""
        title = html.escape(f"Plan for {self.model}")
        parts = [f"<h1>{title}</h1>", f"<pre>{html.escape(chr(10).join(self.lines()))}</pre>"]
        if self.plans:
            plan = self.plans[0]
            used = {name.replace("_", " "): value for name, value in vars(plan.state.limits).items()}
            parts += [
                "<h2>What of its limits each gang uses, with this load</h2>",
                _bars({f"{name} of its limit": value for name, value in used.items()}, 1.0),
                "<h2>A step, and the first token of a long prompt, by requests a second of a gang</h2>",
                _curves(plan),
                "<h2>What a gang serves more with 10 % more of one resource</h2>",
                _bars(dict(plan.gains()), 0.1),
                "<h2>Where gangs lie</h2>",
                _nodes(plan),
            ]
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>'
            "body{font:15px sans-serif;max-width:60em;margin:2em auto;color:#1f2328}pre{background:#f6f8fa;padding:1em;"
            "overflow-x:auto}h2{font-size:1.1em;margin-top:2em}svg{max-width:100%}</style></head><body>"
            f"{''.join(parts)}</body></html>\n"
        )


def _plan_lines(plans: Sequence[ServingPlan]) -> Iterator[str]:
    plan = plans[0]
    state, gang = plan.state, plan.gang
    yield (
        f"{plan.num_devices} of {gang.device.name}: {plan.num_gangs} gangs of {plan.degree}, "
        f"{-(-plan.num_gangs // (plan.devices_per_node // plan.degree))} nodes, at an efficiency of {gang.efficiency:g}"
    )
    yield (
        f"a gang: {state.requests_per_s:.3g} requests/s of {plan.peak.requests_per_s:.3g} at most, "
        f"{state.num_sequences:.3g} sequences, a step of {state.step_s * 1e3:.3g} ms, a token in "
        f"{state.interval_s * 1e3:.3g} ms, the first in {state.first_token_s:.3g} s"
    )
    yield (
        f"a worker: pool {format_byte_size(plan.pool_bytes)}, of which KV takes "
        f"{format_byte_size(int(state.kv_bytes / plan.degree))} and adapters in use "
        f"{format_byte_size(int(state.adapter_bytes / plan.degree))}; host memory for adapters "
        f"{format_byte_size(plan.host_bytes)}; {state.loads_per_s:.3g} loads/s"
    )
    name, _ = plan.peak.limits.binding()
    slowest = max(plan.peak.step_shares, key=lambda each: plan.peak.step_shares[each])
    other_limits = sorted((value, key.replace("_", " ")) for key, value in vars(plan.peak.limits).items())[:-1]
    yield (
        f"what ends a gang: {name}; next {other_limits[-1][1]}, at {other_limits[-1][0]:.0%} of its limit then. A "
        f"step is {plan.peak.step_shares[slowest]:.0%} {slowest}"
    )
    gains = ", ".join(f"{name} {value:+.1%}" for name, value in plan.gains())
    yield f"10 % more of each gives: {gains}; one more gang {1 / plan.num_gangs:+.1%}"
    if plan.price_per_s is not None:
        traffic = gang.traffic
        of_answers = plan.price_of_million(traffic.answer.mean)
        of_all = plan.price_of_million(traffic.answer.mean + traffic.prompt.mean)
        yield f"a million tokens: {of_answers:.3g} of answers, {of_all:.3g} with prompts, at {plan.price_per_hour:g}/h"
    yield ""
    yield f"{'device':18} {'degree':>6} {'gangs':>6} {'devices':>8} {'req/s of one':>13} {'ends at':>16} {'price/h':>9}"
    for each in plans:
        price = "-" if each.price_per_hour is None else f"{each.price_per_hour * each.num_devices:.4g}"
        yield (
            f"{each.gang.device.name:18} {each.degree:6} {each.num_gangs:6} {each.num_devices:8} "
            f"{each.peak.requests_per_s:13.3g} {each.peak.limits.binding()[0]:>16} {price:>9}"
        )


def _plan_json(plan: ServingPlan) -> dict[str, Any]:
    name, value = plan.peak.limits.binding()
    traffic = plan.gang.traffic
    return {
        "device": plan.gang.device.name,
        "degree": plan.degree,
        "efficiency": plan.gang.efficiency,
        "gangs": plan.num_gangs,
        "devices": plan.num_devices,
        "pool_bytes": plan.pool_bytes,
        "host_bytes": plan.host_bytes,
        "settings": plan.settings,
        "places": [asdict(place) for place in plan.places],
        "binding": {"limit": name, "used": value, "step_shares": plan.peak.step_shares},
        "most": asdict(plan.peak),
        "state": asdict(plan.state),
        "gains_of_ten_percent": dict(plan.gains()),
        "gain_of_one_more_gang": 1 / plan.num_gangs,
        "price_of_million_answer_tokens": plan.price_of_million(traffic.answer.mean),
        "price_of_million_tokens": plan.price_of_million(traffic.answer.mean + traffic.prompt.mean),
    }


def _replayed(replay: Replayed) -> dict[str, float | None]:
    return {
        "seconds": replay.seconds,
        "output tokens/s": replay.tokens_per_s,
        "requests answered": len(replay.first_token_s) or None,
        "first token s, median": _share(replay.first_token_s, 50),
        "first token s, 95 %": _share(replay.first_token_s, 95),
        "token interval s, median": _share(replay.token_interval_s, 50),
        "token interval s, 95 %": _share(replay.token_interval_s, 95),
        "sequences at once, at most": replay.most_running,
        "pages used, at most": replay.most_used_pages,
        "preemptions": replay.num_preemptions,
    }


def _share(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _bars(values: Mapping[str, float], full: float) -> str:
    """One bar for each value; `full` is the width of the picture, and a larger one ends there."""
    rows = []
    for number, (name, value) in enumerate(values.items()):
        width = max(0.0, min(value / full, 1.0)) * (_WIDTH - 260)
        y = 8 + 26 * number
        rows.append(
            f'<text x="0" y="{y + 14}">{html.escape(name)}</text>'
            f'<rect x="190" y="{y}" width="{width:.1f}" height="18" fill="{_COLOURS[0]}"/>'
            f'<text x="{196 + width:.1f}" y="{y + 14}">{value:.1%}</text>'
        )
    return _svg("".join(rows), 26 * len(rows) + 16)


def _curves(plan: ServingPlan) -> str:
    """Both objectives as shares of what is requested, so that they have one axis."""
    gang = plan.gang
    max_arrivals = plan.peak.num_sequences / gang.traffic.answer.mean  # arrivals in a step
    states = [gang.at(1.15 * max_arrivals * (number + 1) / _NUM_POINTS) for number in range(_NUM_POINTS)]
    right = states[-1].requests_per_s
    curves = {
        f"token interval over {gang.objectives.token_interval_s * 1e3:g} ms": [s.limits.token_interval for s in states],
        f"first token over {gang.objectives.first_token_s:g} s": [s.limits.first_token for s in states],
        "pool over its size": [s.limits.pool for s in states],
    }
    top = 1.3

    def at(requests_per_s: float, value: float) -> str:
        x = _MARGIN + (_WIDTH - _MARGIN - 10) * requests_per_s / right
        return f"{x:.1f},{_HEIGHT - 40 - (_HEIGHT - 60) * min(value, top) / top:.1f}"

    drawn = [
        f'<polyline fill="none" stroke="#8c959f" points="{at(0, top)} {at(0, 0)} {at(right, 0)}"/>',
        f'<polyline fill="none" stroke="#cf222e" stroke-dasharray="5 4" points="{at(0, 1)} {at(right, 1)}"/>',
        f'<text x="4" y="{at(0, 1).split(",")[1]}">100 %</text>',
        f'<text x="{_WIDTH - 150}" y="{_HEIGHT - 22}">{right:.3g} requests/s</text>',
        '<polyline fill="none" stroke="#6e7781" stroke-dasharray="2 3" points="'
        f'{at(plan.state.requests_per_s, 0)} {at(plan.state.requests_per_s, top)}"/>',
    ]
    for number, (name, values) in enumerate(curves.items()):
        points = " ".join(at(state.requests_per_s, value) for state, value in zip(states, values, strict=True))
        drawn.append(
            f'<polyline fill="none" stroke-width="2" stroke="{_COLOURS[number]}" points="{points}"/>'
            f'<text x="{_MARGIN + 180 * number - 50}" y="{_HEIGHT - 4}" fill="{_COLOURS[number]}">'
            f"{html.escape(name)}</text>"
        )
    return _svg("".join(drawn), _HEIGHT)


def _nodes(plan: ServingPlan) -> str:
    """The first nodes, with each gang's devices in one colour."""
    places = [place for place in plan.places if place.node < 8]
    drawn = []
    for number, place in enumerate(places):
        y = 6 + 30 * place.node
        for device in place.devices:
            colour = _COLOURS[number % len(_COLOURS)]
            drawn.append(
                f'<rect x="{70 + 44 * device}" y="{y}" width="40" height="22" fill="{colour}"/>'
                f'<text x="{76 + 44 * device}" y="{y + 15}" fill="#fff">{number}</text>'
            )
    nodes = sorted({place.node for place in places})
    drawn += [f'<text x="0" y="{21 + 30 * node}">node {node}</text>' for node in nodes]
    more = plan.places[-1].node - nodes[-1]
    if more:
        drawn.append(f'<text x="0" y="{21 + 30 * len(nodes)}">and {more} more nodes</text>')
    return _svg("".join(drawn), 30 * (len(nodes) + bool(more)) + 10)


def _svg(content: str, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'font-family="sans-serif" font-size="12">{content}</svg>'
    )


# Costs of a base's steps on this machine: an engine is built, given loads, and timed.

NUM_ADAPTERS = 16  # that steps are measured with
_ROUNDS = 2


def measure_machine(model_path: Path) -> StepCosts:
    """On CPUs, with motet's defaults, in bfloat16. Raises ValueError for a base that cannot be served."""
    with tempfile.TemporaryDirectory(prefix="motet-costs-") as folder:
        config = engine_config(model_path, Path(folder))
        layout = ModelSharding(ModelConfig.from_folder(model_path)).layout(config.block_size, config.dtype)
        refs = random_adapters(AdapterStore(config.store_path), layout, NUM_ADAPTERS)
        engine = build_engine(config)
        engine.executor = recording = RecordingExecutor(engine.executor)
        try:
            free_id = load_each(engine, recording, refs, 0)
            recording.steps.clear()  # those of a process that has just started are slow
            record_loads(engine, recording, refs, free_id, _ROUNDS)
        finally:
            engine.close()
    return costs_of(recording, engine.info, model_path)


def engine_config(model_path: Path, data_dir: Path) -> EngineConfig:
    """Without a cache of prefixes: no prompts of a trace share one, and kept pages would have to be evicted."""
    return MotetConfig.of(
        model_path=model_path, data_dir=data_dir, device="cpu", dtype="bfloat16", prefix_cache=False
    ).engine
