"""`motet scale`."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import click

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
    from ..manifests.scale_plan import (
        CannotScale,
        Numbers,
        active_cluster,
        scale_plan,
    )  # loaded here: only it needs yaml

    wanted = Numbers(min_gangs=min_gangs, max_gangs=max_gangs, num_routers=num_routers)
    if wanted == Numbers():
        raise click.UsageError("give --gangs, --max-gangs or --routers")
    kubectl = Kubectl(namespace)
    service = kubectl.get("rayservice", name)
    try:
        cluster = kubectl.get("raycluster", active_cluster(service))
        changes = scale_plan(service, cluster, wanted, group)
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
        found: dict[str, Any] = json.loads(self.run("get", kind, name, "--output=json"))
        return found

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
