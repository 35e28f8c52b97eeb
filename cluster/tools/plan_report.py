"""A plan as lines, as JSON, and as a page with pictures that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from ...workers.costs.replay import Replayed
from ..byte_size import format_byte_size
from .serving_planner import ServingPlan

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
        for name, replay in self.replayed.items():
            yield ""
            yield f"the trace on {name}"
            yield from (f"  {key}: {value:.4g}" for key, value in _replayed(replay).items() if value is not None)
            yield from (f"  refused, {count}: {why}" for why, count in replay.refused.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plans": [_plan_json(plan) for plan in self.plans],
            "refused": dict(self.refused),
            "replayed": {
                name: _replayed(replay) | {"refused": replay.refused} for name, replay in self.replayed.items()
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
