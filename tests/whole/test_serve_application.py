"""motet as an application that Serve's REST API deploys on a cluster of others, with its secrets in files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from motet.adapters.registry.registry_keys import ROLLOUTS, STARTS
from motet.cluster.application.secret_files import SECRETS_VARIABLE
from motet.cluster.config import MotetConfig
from motet.cluster.edge.haproxy import write_haproxy
from motet.cluster.edge.serve_variables import BINARY_VARIABLE, LASTING_STARTS, LASTING_STREAMS, SERVE_FLAGS
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.redis_server import RedisServer
from motet.cluster.tools.file_problems import serve_config
from motet.tests.rigs.kube_tools import kustomized, only
from motet.tests.rigs.lasting_load import client_of
from motet.tests.rigs.operators import answered
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.ray_nodes import DEMO, RayNodes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 for loopback"),
]
HOST = "127.0.0.2"  # by 127.0.0.1 Ray understands the machine's address
KEYS = {"acme": "the-key-of-acme-alone", "zoo": "the-key-of-zoo-alone"}
OPERATOR_KEY = "a-key-of-operators"
TOKEN = "a-token-of-routers-and-gangs"
TRIAL = Path(__file__).parents[2] / "deploy" / "kustomize" / "overlays" / "cpu-trial"


class Application:
    """motet on one node, as Serve's REST API sees it."""

    def __init__(
        self,
        nodes: RayNodes,
        dashboard_port: int,
        config: dict[str, Any],
        secrets: dict[str, str],
        secrets_path: Path,
    ) -> None:
        self.nodes, self.config, self.secrets, self.secrets_path = nodes, config, secrets, secrets_path
        self.url = f"http://{HOST}:{config['http_options']['port']}"
        self._dashboard = httpx.Client(
            base_url=f"http://{HOST}:{dashboard_port}",
            headers={"Authorization": f"Bearer {nodes.token}"},
            trust_env=False,
            timeout=PATIENCE_S,
        )

    def close(self) -> None:
        self._dashboard.close()

    def deploy(self) -> None:
        """Returns when the application runs as the config says."""
        self.configure()
        self.wait_until_whole()

    def configure(self) -> None:
        """Has Serve begin with what the config says."""
        answer = self._dashboard.put("/api/serve/applications/", json=self.config)
        assert answer.status_code == 200, answer.text

    def wait_until_whole(self) -> None:
        eventually(self._is_done, lambda: json.dumps(self.details())[-5000:])

    def args(self) -> dict[str, Any]:
        """The application's arguments, to be changed for the next `configure`."""
        found: dict[str, Any] = self.config["applications"][0]["args"]
        return found

    def status(self) -> dict[str, Any]:
        with client_of(self.url, OPERATOR_KEY) as http:
            found: dict[str, Any] = answered(http, "/status").json()
        return found

    def gauge(self, name: str, **labels: str) -> float | None:
        """Of a router's metrics; None: it has no such series."""
        with client_of(self.url, OPERATOR_KEY) as http:
            families = [*text_string_to_metric_families(answered(http, "/metrics").text)]
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return next((one.value for one in samples if labels.items() <= one.labels.items()), None)

    def noted(self, prefix: str) -> str:
        """The values of the hashes in Redis whose key begins so."""
        with Redis.from_url(self.secrets["redis-url"], decode_responses=True) as redis:
            return " ".join(text for key in redis.keys(f"{prefix}*") for text in redis.hvals(key))

    def _is_done(self) -> bool:
        status = self.details()["status"]
        assert status != "DEPLOY_FAILED", json.dumps(self.details())
        healthy = all(one["status"] == "HEALTHY" for one in self.details()["deployments"].values())
        return bool(status == "RUNNING" and healthy)

    def details(self) -> dict[str, Any]:
        found: dict[str, Any] = self.shown("/api/serve/applications/")["applications"]["motet"]
        return found

    def shown(self, path: str) -> dict[str, Any]:
        answer = self._dashboard.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pids(self, deployment: str) -> set[int]:
        replicas = self.details()["deployments"][deployment]["replicas"]
        return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}

    def deployment(self, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = self.config["applications"][0]["deployments"]
        return next(one for one in found if one["name"] == name)

    def set_live(self, deployment: str, **user_config: Any) -> None:
        self.deployment(deployment)["user_config"] = {key.replace("_", "-"): v for key, v in user_config.items()}
        self.deploy()

    def shown_by_front(self, path: str) -> int:
        return httpx.get(self.url + path, trust_env=False, timeout=PATIENCE_S).status_code

    def ask(self, key: str, **fields: Any) -> httpx.Response:
        body = {"model": "demo", "prompt": "capital", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        return httpx.post(
            f"{self.url}/v1/completions",
            headers={"Authorization": f"Bearer {key}"},
            json=body | fields,
            trust_env=False,
            timeout=PATIENCE_S,
        )


def trial_config(port: int, model_path: Path, data_path: Path) -> dict[str, Any]:
    """What the trial on Kubernetes is deployed with, but for the places of its files and its port."""
    config = serve_config(only(kustomized(TRIAL), "RayService"))
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] |= {"model": str(model_path), "data-dir": str(data_path)}
    application["deployments"] = [{"name": name, "user_config": {}} for name in ("router", "gang")]
    return config


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    folder = tmp_path_factory.mktemp("application")
    redis = RedisServer(folder / "redis", host=HOST)
    redis_url = redis.start()
    secrets = {
        "redis-url": redis_url,
        "operator-key": OPERATOR_KEY,
        "keys": "".join(f"{tenant}={key}\n" for tenant, key in KEYS.items()),
        "cluster-token": TOKEN,
    }
    secrets_path = folder / "secrets"
    secrets_path.mkdir(mode=0o700)
    for name, text in secrets.items():
        (secrets_path / name).write_text(text)
    edge = MotetConfig.of(model_path=DEMO / "base").edge
    variables: dict[str, Any] = SERVE_FLAGS | LASTING_STREAMS | LASTING_STARTS | {SECRETS_VARIABLE: str(secrets_path)}
    variables[BINARY_VARIABLE] = str(write_haproxy(folder / "haproxy", edge, None))
    port, dashboard_port = free_ports(2)
    config = trial_config(port, folder / "model", folder / "data")
    try:
        with RayNodes([HOST], MOTET_KEYS="", MOTET_OPERATOR_KEY="", **variables) as nodes:
            nodes.start(0, num_cpus=8, dashboard_port=dashboard_port, **{"motet-router": 4.0})
            application = Application(nodes, dashboard_port, config, secrets, secrets_path)
            application.configure()
            # Its model is put there while it starts.
            eventually(lambda: {"gang", "router"} <= set(re.findall(r'"kind":"(\w+)"', application.noted(STARTS))))
            assert "it waits for the model: " in application.noted(STARTS)
            (folder / "model").symlink_to(DEMO / "base")
            application.wait_until_whole()
            eventually(lambda: application.shown_by_front("/ready") == 200)
            yield application
            application.close()
    finally:
        redis.stop()


def test_it_serves_and_takes_settings_over_as_it_runs(application: Application) -> None:
    answer = application.ask(KEYS["acme"], n=3)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 9
    assert application.ask("no-key").status_code == 401
    routers, gangs = application.pids("router"), application.pids("gang")
    assert (len(routers), len(gangs)) == (1, 1)
    application.set_live("router", max_sequences_per_request=2, latency_objective=["acme=30"])
    application.set_live("gang", max_waiting_sequences=7, token_interval=0.2, tenant_running_share=0.5)
    eventually(lambda: application.ask(KEYS["acme"], n=3).status_code == 400)
    assert application.ask(KEYS["acme"], n=2).status_code == 200
    # What is wrong changes nothing, and ends no process.
    application.set_live("router", max_sequences_per_request=4, gang_wait=3)
    application.set_live("gang", pool_bytes="1GiB")
    assert application.ask(KEYS["acme"], n=3).status_code == 400
    application.set_live("gang")
    application.set_live("router")
    eventually(lambda: application.ask(KEYS["acme"], n=3).status_code == 200)
    assert (application.pids("router"), application.pids("gang")) == (routers, gangs)


def test_no_secret_shows(application: Application) -> None:
    """Not in Ray's state, in Serve's, in arguments or variables of a process, nor in a file of the session."""
    hidden = [*KEYS.values(), OPERATOR_KEY, TOKEN, str(urlsplit(application.secrets["redis-url"]).password)]
    reported = {
        path: json.dumps(application.shown(path))
        for path in ("/api/serve/applications/", "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1", "/api/v0/workers")
    }
    assert all("motet" in reported[path] for path in list(reported)[:2])
    processes = application.nodes.processes()
    assert len(processes) > 5
    for process in processes:
        reported[f"arguments of {process.pid}"] = " ".join(_of(process.cmdline))
        reported[f"environment of {process.pid}"] = json.dumps(_of(process.environ))
    files = [path for path in application.nodes.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any("gang" in path.name for path in files)
    reported |= {str(path): path.read_bytes().decode(errors="replace") for path in files}
    assert [place for place, text in reported.items() if any(secret in text for secret in hidden)] == []


def test_another_argument_replaces_all(application: Application) -> None:
    routers, gangs = application.pids("router"), application.pids("gang")
    application.config["applications"][0]["args"]["max-num-sequences"] = 17
    scaling = {
        "min_replicas": 1,
        "max_replicas": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "look_back_period_s": 5,
        "metrics_interval_s": 1,
        "policy": {
            "policy_function": "motet.cluster.replicas.autoscaler:GangAutoscaler",
            "policy_kwargs": {"scale_down_after_s": 60},
        },
    }
    application.deployment("gang")["autoscaling_config"] = scaling
    application.deploy()
    eventually(lambda: application.ask(KEYS["zoo"]).status_code == 200)
    routers_after, gangs_after = application.pids("router"), application.pids("gang")
    assert not routers_after & routers
    assert not gangs_after & gangs
    scaling |= {"min_replicas": 2, "max_replicas": 2}
    application.deploy()
    eventually(lambda: len(application.pids("gang")) == 2)
    assert gangs_after < application.pids("gang")
    assert application.pids("router") == routers_after
    eventually(lambda: application.gauge("motet_wanted_gangs") == 2)
    eventually(lambda: application.gauge("motet_serve_status", status="RUNNING") == 1)
    assert application.gauge("motet_head_connected") == 1
    assert application.gauge("motet_rollout_seconds") == 0


def test_a_rollout_waits_for_what_is_away_and_gives_way_if_it_cannot_be(application: Application) -> None:
    """Two gangs serve before, and after, with the settings before."""
    model_path = Path(application.args()["model"])
    gangs = application.pids("gang")
    assert len(gangs) == 2
    model_path.unlink()
    application.args()["max-num-sequences"] = 18
    application.configure()
    eventually(lambda: any(one["kind"] == "gang" for one in application.status()["starts"]))
    report = next(one for one in application.status()["starts"] if one["kind"] == "gang")
    assert report["reason"].startswith(f"it waits for the model: {model_path} lacks config.json")
    assert not report["has_failed"]
    eventually(lambda: application.gauge("motet_waiting_starts", kind="gang") == 1)
    eventually(lambda: (application.gauge("motet_rollout_seconds") or 0) > 0)
    assert application.ask(KEYS["zoo"]).status_code == 200  # by the other gang
    model_path.symlink_to(DEMO / "base")
    application.wait_until_whole()
    eventually(lambda: application.status()["starts"] == [])
    before = application.pids("gang")
    assert len(before) == 2 and not before & gangs
    eventually(lambda: '"max-num-sequences":18' in application.noted(ROLLOUTS))

    good = application.args()["kv-host-bytes"]
    application.args()["kv-host-bytes"] = "1024TiB"  # known only when a gang starts
    application.configure()
    eventually(
        lambda: application.details()["deployed_app_config"]["args"]["kv-host-bytes"] == good,
        lambda: json.dumps([application.details(), application.status()])[-5000:],
    )
    application.wait_until_whole()
    assert before & application.pids("gang")
    eventually(lambda: application.status()["taken_back"] is not None)
    assert application.status()["taken_back"].startswith("gang: ")
    assert application.gauge("motet_rollout_taken_back") == 1
    assert [gang["max_num_sequences"] for gang in application.status()["gangs"]] == [18, 18]
    assert application.ask(KEYS["zoo"]).status_code == 200
    application.args()["kv-host-bytes"] = good
    application.configure()
    eventually(lambda: application.status()["taken_back"] is None)


def test_another_operators_key_counts_without_a_restart(application: Application) -> None:
    """The last test: the others have the first key."""
    routers = application.pids("router")
    path = application.secrets_path / "operator-key"
    path.write_text("another-key-of-operators")

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{application.url}/status", headers=headers, trust_env=False, timeout=PATIENCE_S).status_code

    eventually(lambda: status("another-key-of-operators") == 200)
    assert status(OPERATOR_KEY) == 401
    assert application.pids("router") == routers


def _of(read: Any) -> Any:
    try:
        return read()
    except psutil.Error:
        return []
