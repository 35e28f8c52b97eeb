"""`motet costs`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...workers.costs.devices import DEVICES

if TYPE_CHECKING:
    from ...workers.costs.devices import Device

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
    from ...workers.costs.model_size import gang_weights_bytes, kv_bytes_of_a_token, model_size
    from ...workers.costs.operations import Batch, Chunk, step_operations
    from ...workers.models.config import ModelConfig
    from ...workers.models.sharding import ModelSharding

    chunks = (Chunk(0, prompt_tokens),) if prompt_tokens else ()
    try:
        config = ModelConfig.from_folder(model)
        ModelSharding(config, degree)  # refuses a degree that motet would refuse
        device = _device(name)
        batch = Batch((context,) * decodes, chunks, adapters, rank)
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

    from ...workers.costs.measured_device import measured_device

    return measured_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _measure(model: Path, path: Path) -> None:
    from ..planning.measured_machine import measure_machine

    try:
        costs = measure_machine(model)
        costs.write(path)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{costs.num_steps} steps of {costs.model}, {costs.num_threads} threads; half of them within "
        f"{costs.residual:.1%} of the fit"
    )
