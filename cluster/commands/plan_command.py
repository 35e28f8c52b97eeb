"""`motet plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...workers.costs.devices import DEVICES

if TYPE_CHECKING:
    from ...workers.costs.replay import Replayed
    from ..planning.serving_planner import ServingPlan

_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)


@click.command("plan")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--requests-per-s", type=_POSITIVE, help="Traffic; by default the trace's.")
@click.option("--prompt-tokens", type=_POSITIVE, default=1024, show_default=True, help="On average.")
@click.option("--prompt-deviation", type=click.FloatRange(min=0), default=0, show_default=True, help="Lognormal.")
@click.option("--answer-tokens", type=_POSITIVE, default=256, show_default=True, help="On average.")
@click.option("--answer-deviation", type=click.FloatRange(min=0), default=0, show_default=True, help="Lognormal.")
@click.option("--adapters", "num_adapters", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--rank", "ranks", type=_COUNT, multiple=True, default=(16,), help="Of the adapters in turn; repeatable.")
@click.option(
    "--popularity",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Share of the i-th adapter: proportional to i to the power of minus this.",
)
@click.option("--first-token-s", type=_POSITIVE, default=2.0, show_default=True, help="Objective, of long prompts.")
@click.option("--token-interval-s", type=_POSITIVE, default=0.05, show_default=True, help="Objective, of busy steps.")
@click.option("--device", "devices", type=click.Choice([*DEVICES]), multiple=True, help="Repeatable. [H100 SXM]")
@click.option(
    "--price",
    "prices",
    type=(click.Choice([*DEVICES]), click.FloatRange(min=0)),
    multiple=True,
    metavar="DEVICE PRICE",
    help="Price of an hour of a device; repeatable.",
)
@click.option("--devices-per-node", type=_COUNT, default=8, show_default=True)
@click.option(
    "--efficiency",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Time by data sheets over actual time. [as measured: H100 SXM 0.6; others 0.5, an assumption]",
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL: arrival_s, prompt_tokens, output_tokens, adapter, tenant. Replayed on motet's scheduler.",
)
@click.option(
    "--costs",
    "costs_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of `motet costs --measure`: replays the trace only with its machine's times.",
)
@click.option(
    "--gangs", type=_COUNT, default=1, show_default=True, help="With --costs: gangs that get the requests in turn."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", "page_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts.")
def plan(
    model: Path,
    requests_per_s: float | None,
    prompt_tokens: float,
    prompt_deviation: float,
    answer_tokens: float,
    answer_deviation: float,
    num_adapters: int,
    ranks: tuple[int, ...],
    popularity: float,
    first_token_s: float,
    token_interval_s: float,
    devices: tuple[str, ...],
    prices: tuple[tuple[str, float], ...],
    devices_per_node: int,
    efficiency: float | None,
    trace_path: Path | None,
    costs_path: Path | None,
    gangs: int,
    as_json: bool,
    page_path: Path | None,
) -> None:
    """Plan devices for a load, or replay a trace of one.

    MODEL is a folder with config.json; weights are not needed. The plan uses the cost model (`motet costs`): the fewest
    or cheapest devices that meet the objectives of first tokens and token intervals. A trace replaces traffic, lengths
    and adapters, and is replayed on motet's own scheduler in virtual time.
    """
    if trace_path is None and (costs_path is not None or requests_per_s is None):
        raise click.UsageError("give --requests-per-s, or a --trace")
    from ...workers.costs.step_costs import StepCosts
    from ...workers.costs.trace import read_trace
    from ...workers.models.config import ModelConfig
    from ..planning.demand import Adapters, Objectives, Spread, Traffic
    from ..planning.gang_capacity import EFFICIENCY
    from ..planning.plan_report import Report
    from ..planning.serving_planner import best, options
    from ..planning.trace_replay import replay_on_gangs, replay_on_machine

    try:
        config, objectives = ModelConfig.from_folder(model), Objectives(first_token_s, token_interval_s)
        trace = () if trace_path is None else read_trace(trace_path)
        plans: list[ServingPlan] = []
        refused: dict[str, str] = {}
        replayed: dict[str, Replayed] = {}
        if costs_path is not None:
            costs = StepCosts.read(costs_path)
            name = f"{gangs} gangs as {costs.machine} has them, {costs.num_threads} threads each"
            replayed[name] = replay_on_machine(model, costs, trace, ranks, gangs)
        else:
            if trace:
                traffic = Traffic.of_trace(trace, ranks, requests_per_s)
            else:
                assert requests_per_s is not None
                prompt, answer = Spread(prompt_tokens, prompt_deviation), Spread(answer_tokens, answer_deviation)
                adapters = Adapters.by_power_law(num_adapters, popularity, ranks)
                traffic = Traffic(requests_per_s, prompt, answer, adapters)
            given = dict(prices)
            for name in devices or ("H100 SXM",):
                found, why = options(
                    config,
                    DEVICES[name],
                    traffic,
                    objectives,
                    devices_per_node,
                    given.get(name),
                    efficiency=efficiency or DEVICES[name].efficiency or EFFICIENCY,
                )
                plans += found
                refused |= {f"{degree} of {name}": reason for degree, reason in why.items()}
        if plans:
            chosen = best(plans)
            plans = [chosen, *(each for each in plans if each is not chosen)]
            if trace:
                name = f"{chosen.num_gangs} gangs of {chosen.degree} {chosen.gang.device.name}"
                replayed[name] = replay_on_gangs(model, chosen, trace)
        report = Report(model.name, tuple(plans), refused, replayed)
        if page_path is not None:
            page_path.write_text(report.page())
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        click.echo("\n".join(report.lines()))
    if not plans and not replayed:
        raise click.exceptions.Exit(1)
