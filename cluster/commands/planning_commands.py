"""`motet plan`, `motet mig` and `motet costs`: what a deployment needs, computed before there is one."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...workers.costs.devices import DEVICES
from ..tools.mig import MIG_GPUS, placement_text

if TYPE_CHECKING:
    from ...workers.costs.devices import Device
    from ...workers.costs.replay import Replayed
    from ..tools.mig import ModelDemand
    from ..tools.serving_planner import ServingPlan


# `motet plan`.

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
    from ...workers.costs.replay import read_trace
    from ...workers.costs.step_costs import StepCosts
    from ...workers.models.config import ModelConfig
    from ..tools.gang_capacity import EFFICIENCY, Adapters, Objectives, Spread, Traffic
    from ..tools.serving_planner import Report, best, options, replay_on_gangs, replay_on_machine

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
            prices_by_device = dict(prices)
            for name in devices or ("H100 SXM",):
                device_plans, why = options(
                    config,
                    DEVICES[name],
                    traffic,
                    objectives,
                    devices_per_node,
                    prices_by_device.get(name),
                    efficiency=efficiency or DEVICES[name].efficiency or EFFICIENCY,
                )
                plans += device_plans
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


# `motet mig`.

_KEYS = {"name", "path", "users", "context", "objective-s"}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpu", "gpu_name", type=click.Choice([*MIG_GPUS]), default="A100 SXM 80GB", show_default=True)
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the map of configurations, labels and settings.")
def mig(file: Path, gpu_name: str, gpus_per_node: int, as_json: bool) -> None:
    """Plan MIG slices for several models on as few GPUs as possible.

    FILE is TOML with a table [[models]] for each: name, path (a folder with config.json), users (sequences at once),
    context (tokens of each), and objective-s (seconds a token, 0.05 unless given).
    """
    from ..tools.mig import CONFIG_LABEL, mig_manifests, plan

    try:
        mig_plan = plan(_demands(file), MIG_GPUS[gpu_name])
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    manifests = mig_manifests(mig_plan, gpus_per_node)
    if as_json:
        labels = [{CONFIG_LABEL: config} for config in manifests.node_configs]
        click.echo(
            json.dumps({"config_map": manifests.config_map, "node_labels": labels, "settings": manifests.settings})
        )
        return
    for gangs in mig_plan.gangs:
        click.echo(f"{gangs.model}: {gangs.num_gangs} of {gangs.profile.name}, {gangs.users} users each at most")
    click.echo(f"\n{len(mig_plan.gpus)} GPUs; these slices need {mig_plan.at_least} at least")
    for number, placement in enumerate(mig_plan.gpus):
        click.echo(f"  {number}: {placement_text(placement)}")


def _demands(file: Path) -> list[ModelDemand]:
    from ...workers.models.config import ModelConfig
    from ..tools.mig import ModelDemand

    document: dict[str, Any] = tomllib.loads(file.read_text())
    models = document.get("models")
    if set(document) != {"models"} or not isinstance(models, list) or not models:
        raise ValueError(f"{file} has to have a table [[models]] for each model, and nothing else")
    demands = []
    for model in models:
        lacking = _KEYS - {"objective-s"} - set(model)
        if lacking or set(model) - _KEYS:
            raise ValueError(f"a model of {file} has {sorted(model)}: {sorted(_KEYS)} are accepted")
        users, context, objective_s = model["users"], model["context"], model.get("objective-s", 0.05)
        if type(users) is not int or type(context) is not int or type(objective_s) not in (int, float):
            raise ValueError(f"{model['name']}: users and context are whole numbers, objective-s is a number")
        config = ModelConfig.from_folder(file.parent / str(model["path"]))
        demands.append(ModelDemand.of(str(model["name"]), config, users, context, float(objective_s)))
    return demands


# `motet costs`.

THIS_MACHINE = "this machine"


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", "name", type=click.Choice([*DEVICES, THIS_MACHINE]), default="H100 SXM", show_default=True)
@click.option("--degree", type=click.IntRange(min=1), default=1, show_default=True, help="Devices of a gang.")
@click.option("--decodes", type=click.IntRange(min=0), default=64, show_default=True, help="Sequences that decode.")
@click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens that each sees.")
@click.option("--prompt-tokens", type=click.IntRange(min=0), default=0, show_default=True, help="Of one new prompt.")
@click.option(
    "--adapters", type=click.IntRange(min=0), default=0, show_default=True, help="Different ones in the step."
)
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Of the adapters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--measure",
    "measured_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure steps of this base, which needs its weights, on this machine's CPUs, and write their costs for "
    "`motet plan --trace`. It takes a minute or two.",
)
def costs(
    model: Path,
    name: str,
    degree: int,
    decodes: int,
    context: int,
    prompt_tokens: int,
    adapters: int,
    rank: int,
    as_json: bool,
    measured_path: Path | None,
) -> None:
    """Show a base's size, and the least that each operation of a step takes, by its config.json.

    MODEL is a folder with config.json; weights are not needed. Devices have the limits of their data sheets, and
    "this machine" those that are measured now.
    """
    if measured_path is not None:
        _measure(model, measured_path)
        return
    if not decodes and not prompt_tokens:
        raise click.UsageError("give --decodes or --prompt-tokens")
    from ...workers.costs.operations import (
        Chunk,
        StepBatch,
        gang_weights_bytes,
        kv_bytes_of_a_token,
        model_size,
        state_bytes_of_a_sequence,
        step_operations,
    )
    from ...workers.models.config import ModelConfig
    from ...workers.models.sharding import ModelSharding

    chunks = (Chunk(0, prompt_tokens),) if prompt_tokens else ()
    try:
        config = ModelConfig.from_folder(model)
        ModelSharding(config, degree)  # refuses a degree that motet would refuse
        device = _device(name)
        batch = StepBatch((context,) * decodes, chunks, adapters, rank)
        operations = step_operations(config, batch, degree)
        rows: list[dict[str, Any]] = [
            asdict(operation) | {"seconds": operation.seconds(device, degree)} for operation in operations
        ]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    size = model_size(config)
    facts = {
        "parameters": size.num_parameters,
        "active_parameters": size.active,
        "weights_bytes": gang_weights_bytes(config, degree),
        "kv_bytes_of_a_token": kv_bytes_of_a_token(config, degree=degree),
        "flops_of_a_token": size.flops_of_a_token,
    }
    total_s = sum(row["seconds"] for row in rows)
    if as_json:
        click.echo(json.dumps(facts | {"device": asdict(device), "operations": rows, "seconds": total_s}))
        return
    click.echo(
        f"{size.num_parameters / 1e9:.2f}B parameters, {facts['weights_bytes'] / 1e9:.2f} GB in 16 bits; a token "
        f"computes {size.flops_of_a_token / 1e9:.2f} GFLOP and keeps {facts['kv_bytes_of_a_token']} bytes of KV"
    )
    if state_bytes := state_bytes_of_a_sequence(config):
        click.echo(f"each sequence has a recurrent state of {state_bytes / 1e6:.2f} MB")
    click.echo(f"{device.name}: {device.flops_per_s / 1e12:.4g} TFLOP/s, {device.bytes_per_s / 1e9:.4g} GB/s\n")
    click.echo(f"{'operation':18} {'GFLOP':>12} {'GB':>9} {'network GB':>11} {'ms':>9}")
    for row, operation in zip(rows, operations, strict=True):
        click.echo(
            f"{operation.name:18} {operation.flops / 1e9:12.1f} {operation.memory_bytes / 1e9:9.3f} "
            f"{operation.network_bytes / 1e9:11.3f} {row['seconds'] * 1e3:9.3f}"
        )
    click.echo(f"{'a step':18} {'':12} {'':9} {'':11} {total_s * 1e3:9.3f}")


def _device(name: str) -> Device:
    if name != THIS_MACHINE:
        return DEVICES[name]
    import torch

    from ...workers.costs.measured_steps import measured_device

    return measured_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _measure(model: Path, path: Path) -> None:
    from ..tools.serving_planner import measure_machine

    try:
        costs = measure_machine(model)
        costs.write(path)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{costs.num_steps} steps of {costs.model}, {costs.num_threads} threads; half of them within "
        f"{costs.residual:.1%} of the fit"
    )
