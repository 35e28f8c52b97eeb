"""What `motet status` shows while no router is up: from the registry, and from Ray Serve's REST API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.launches import reports_of_all
from ...adapters.registry.registry import connect
from ..application.secret_files import secrets_of_this_node
from ..launch_secrets import SECRETS_FILE, LaunchSecrets
from ..settings.setting_field import ConfigError

TIMEOUT_S = 5.0
DASHBOARD = "RAY_DASHBOARD_ADDRESS"  # as for Ray's own commands
HEAD = "FQ_RAY_IP"  # KubeRay sets it in the pods of workers
REST_PORT = 8265
WHERE = "run it on a node of motet (kubectl exec into a pod), with its --data-dir"


def routerless_status(data_dir: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Reports of starts, and the state of Serve, or why they are not known: for `status_lines`."""
    redis_url, is_local = _redis_url(data_dir)
    if redis_url is None:
        return {"registry": f"not known here: {WHERE}"}
    try:
        status: dict[str, Any] = {"starts": asyncio.run(_reports(redis_url))}
    except (RegistryUnavailable, ValueError) as error:
        status = {"registry": str(error)}
    return status if is_local else {**status, "serve": _serve(environ)}  # `motet serve` runs no REST API


def _redis_url(data_dir: Path) -> tuple[str | None, bool]:
    """The registry's URL, and whether it is of a `motet serve` on this machine. None: it is not known here."""
    with suppress(OSError, msgspec.MsgspecError):
        return LaunchSecrets.read(data_dir / SECRETS_FILE).redis_url, True
    with suppress(OSError, ConfigError):
        return secrets_of_this_node().redis_url, False
    return None, False


async def _reports(redis_url: str) -> list[dict[str, Any]]:
    client: Any = connect(redis_url)
    try:
        return [msgspec.structs.asdict(report) for report in await reports_of_all(client)]
    finally:
        await client.aclose()


def _serve(environ: Mapping[str, str]) -> dict[str, Any]:
    """The status of each application and deployment."""
    address = environ.get(DASHBOARD) or f"http://{environ.get(HEAD) or '127.0.0.1'}:{REST_PORT}"
    headers = {"Authorization": f"Bearer {environ['RAY_AUTH_TOKEN']}"} if environ.get("RAY_AUTH_TOKEN") else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as client:
            answer = client.get(f"{address}/api/serve/applications/").raise_for_status().json()
            return dict(_states(answer["applications"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        return {"state": f"not known, {address} does not say it ({error or type(error).__name__}): set {DASHBOARD}"}


def _states(applications: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, application in applications.items():
        yield name, _state(application)
        for deployment, its in application["deployments"].items():
            yield f"{name}, {deployment}", _state(its)


def _state(deployment: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in deployment.get("message", "").splitlines() if line.strip()]
    return ": ".join([deployment["status"], *lines[-1:]])
