"""`motet mig`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..planning.mig_profiles import MIG_GPUS, placement_text

if TYPE_CHECKING:
    from ..planning.mig_planner import Demand

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
    from ..planning.mig_manifests import CONFIG_LABEL, mig_manifests
    from ..planning.mig_planner import plan

    try:
        found = plan(_demands(file), MIG_GPUS[gpu_name])
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    manifests = mig_manifests(found, gpus_per_node)
    if as_json:
        labels = [{CONFIG_LABEL: config} for config in manifests.node_configs]
        click.echo(
            json.dumps({"config_map": manifests.config_map, "node_labels": labels, "settings": manifests.settings})
        )
        return
    for gangs in found.gangs:
        click.echo(f"{gangs.model}: {gangs.num_gangs} of {gangs.profile.name}, {gangs.users} users each at most")
    click.echo(f"\n{len(found.gpus)} GPUs; these slices need {found.at_least} at least")
    for number, placement in enumerate(found.gpus):
        click.echo(f"  {number}: {placement_text(placement)}")


def _demands(file: Path) -> list[Demand]:
    from ...workers.models.config import ModelConfig
    from ..planning.mig_planner import Demand

    given: dict[str, Any] = tomllib.loads(file.read_text())
    models = given.get("models")
    if set(given) != {"models"} or not isinstance(models, list) or not models:
        raise ValueError(f"{file} has to have a table [[models]] for each model, and nothing else")
    found = []
    for model in models:
        lacking = _KEYS - {"objective-s"} - set(model)
        if lacking or set(model) - _KEYS:
            raise ValueError(f"a model of {file} has {sorted(model)}: {sorted(_KEYS)} are accepted")
        users, context, objective_s = model["users"], model["context"], model.get("objective-s", 0.05)
        if type(users) is not int or type(context) is not int or type(objective_s) not in (int, float):
            raise ValueError(f"{model['name']}: users and context are whole numbers, objective-s is a number")
        config = ModelConfig.from_folder(file.parent / str(model["path"]))
        found.append(Demand.of(str(model["name"]), config, users, context, float(objective_s)))
    return found
