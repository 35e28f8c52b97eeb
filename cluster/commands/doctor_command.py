"""`motet doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..settings.flags import GroupedCommand, options_of
from ..settings.settings import Settings

# Settings whose values say what is right.
EXAMINED = ("address", "data_dir", "redis_url", "port", "max_connections", "pool_bytes", "tensor_parallel", "device")


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(as_json: bool, **settings: Any) -> None:
    """Look for what would keep motet from serving well, and say what to do.

    Looks at this machine, or with --address at every node of that Ray cluster; give the settings that motet serve gets.
    Ends with status 1 if there is an error.
    """
    from ..doctor.examination import examine_cluster, examine_machine  # loaded here: other commands do without
    from ..doctor.finding import has_errors
    from ..doctor.node_facts import Expectations, Questions
    from ..doctor.report import report_json, report_lines
    from ..edge.edge_limits import EdgeLimits
    from ..launch.local_serve import OBJECT_STORE_BYTES

    address: str | None = settings["address"]
    defaults = Settings()
    limits = EdgeLimits(
        max_connections=settings["max_connections"],
        max_connections_per_source=defaults.access.max_connections_per_source,
        max_requests_per_key=defaults.access.max_requests_per_key,
        max_keyless_per_second=defaults.access.max_keyless_per_second,
        trusted_proxies=defaults.access.trusted_proxies,
    )
    expected = Expectations(
        limits=limits if address is None else None,
        pool_bytes=settings["pool_bytes"] or 0,
        tensor_parallel=settings["tensor_parallel"],
        computes_on_cpu=settings["device"] != "cuda",
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    data_dir: Path = settings["data_dir"]
    questions = Questions(data_dir=data_dir, redis_url=settings["redis_url"])
    if address is None:
        findings = examine_machine(questions, expected, settings["port"])
    else:
        findings = examine_cluster(address, questions, expected)
    if as_json:
        click.echo(report_json(findings))
    else:
        for line in report_lines(findings):
            click.echo(line)
    if has_errors(findings):
        raise click.exceptions.Exit(1)


doctor.params += [option for option in options_of(Settings) if option.name in EXAMINED]
