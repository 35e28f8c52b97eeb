"""`motet check`, `motet doctor`, `motet scale` and `motet edge-program`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, TextIO

import click

from ..edge.haproxy import write_edge_program
from ..edge.serve_variables import BINARY_VARIABLE
from ..settings.settings import Settings
from .serve_command import GroupedCommand, options_of

# `motet check`.


@click.command()
@click.argument("file", type=click.File())
def check(file: TextIO) -> None:
    """Look for what would fail in a cluster of FILE, without one.

    FILE is a rendered RayService (helm template … | motet check -), a configuration of Ray Serve, or, with a name that
    ends in .toml, one of motet serve. Wrong names and values of settings, bounds that do not go together, what
    KubeRay's operator refuses, and servers of settings that the file's NetworkPolicies close are listed, and the
    status is 1.
    """
    from ..tools.file_problems import UnknownFile, file_problems  # loaded here: other commands do without

    try:
        problems = file_problems(file.read(), is_toml=file.name.endswith(".toml"))
    except (UnknownFile, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file.name} cannot be checked: {error}") from error
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.exceptions.Exit(1)
    click.echo("nothing was found that would fail")


# `motet doctor`.

# Settings whose values say what is right.
EXAMINED = ("address", "data_dir", "redis_url", "port", "max_connections", "pool_bytes", "tensor_parallel", "device")


@click.command(cls=GroupedCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(as_json: bool, **settings: Any) -> None:
    """Look for what would keep motet from serving well, and say what to do.

    Looks at this machine, or with --address at every node of that Ray cluster; give the settings that motet serve gets.
    Ends with status 1 if there is an error.
    """
    from ..edge.edge_config import EdgeLimits
    from ..launch.local_serve import OBJECT_STORE_BYTES
    from ..tools.machine_checks import has_errors, report_json, report_lines
    from ..tools.node_facts import Expectations, Questions, examine_cluster, examine_machine

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


# `motet scale`.

TIMEOUT_S = 60.0


@click.command()
@click.option("--gangs", "min_gangs", type=click.IntRange(min=0), metavar="N", help="The fewest gangs.")
@click.option("--max-gangs", type=click.IntRange(min=1), metavar="N", help="The most gangs under load.")
@click.option("--routers", "num_routers", type=click.IntRange(min=1), metavar="N", help="So many routers.")
@click.option("--namespace", "-n", default="motet", show_default=True, help="Of the RayService.")
@click.option("--name", default="motet", show_default=True, help="Of the RayService.")
@click.option("--group", help="The group of pods that grows, where several hold gangs.")
@click.option("--dry-run", is_flag=True, help="Show what would be changed.")
def scale(
    min_gangs: int | None,
    max_gangs: int | None,
    num_routers: int | None,
    namespace: str,
    name: str,
    group: str | None,
    dry_run: bool,
) -> None:
    """Change how many gangs and routers a RayService has, while it serves.

    It needs kubectl with access to the cluster. Serve's numbers and those of pods are changed together, in the
    RayService and in the RayCluster that serves; no process that runs is replaced. Say the same in your values.
    """
    from ..tools.scale_plan import CannotScale, Numbers, active_cluster, scale_plan

    target = Numbers(min_gangs=min_gangs, max_gangs=max_gangs, num_routers=num_routers)
    if target == Numbers():
        raise click.UsageError("give --gangs, --max-gangs or --routers")
    kubectl = Kubectl(namespace)
    service = kubectl.get("rayservice", name)
    try:
        cluster = kubectl.get("raycluster", active_cluster(service))
        changes = scale_plan(service, cluster, target, group)
    except CannotScale as error:
        raise click.ClickException(f"RayService {namespace}/{name} cannot be scaled so: {error}") from error
    for change in changes:
        if dry_run:
            click.echo(f"{change.kind} {change.name}: {json.dumps(change.patch)}")
        else:
            click.echo(
                kubectl.run("patch", change.kind, change.name, "--type=json", "--patch", json.dumps(change.patch))
            )


class Kubectl:
    """The program, in one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def get(self, kind: str, name: str) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.run("get", kind, name, "--output=json"))
        return manifest

    def run(self, *arguments: str) -> str:
        """What it prints. Raises ClickException with what it says when it fails."""
        program = shutil.which("kubectl")
        if program is None:
            raise click.ClickException("kubectl is not installed, or not in PATH")
        command = [program, "--namespace", self._namespace, *arguments]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"kubectl did not answer within {TIMEOUT_S:g} s") from error
        if ended.returncode:
            raise click.ClickException(f"kubectl {arguments[0]} {arguments[1]}: {ended.stderr.strip()}")
        return ended.stdout.strip()


# `motet edge-program`: a step of making an image.


@click.command(
    "edge-program",
    hidden=True,
    help=f"""Write the program that Ray Serve is to run for HAProxy.

    An image, or a machine that runs `ray start` itself, names it in {BINARY_VARIABLE}. Its limits are read from
    MOTET_MAX_CONNECTIONS, MOTET_MAX_CONNECTIONS_PER_SOURCE, MOTET_MAX_REQUESTS_PER_KEY, MOTET_MAX_KEYLESS_PER_SECOND
    and MOTET_TRUSTED_PROXIES whenever HAProxy starts.""",
)
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def edge_program(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_edge_program(path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"{BINARY_VARIABLE}={path.absolute()}")
