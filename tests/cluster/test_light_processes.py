"""Launcher and router do without what takes seconds and hundreds of megabytes to load: each in a fresh Python."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
# By what begins a module's name. Only a gang computes.
HEAVY = ("torch", "triton", "scipy", "pandas", "pyarrow", "transformers.models.llama.modeling")
SLOW = (*HEAVY, "ray", "transformers", "numpy", "redis", "huggingface_hub", "fastapi", "grpc")

PREAMBLE = """
import json, sys
from pathlib import Path
demo, folder = Path(sys.argv[1]), Path(sys.argv[2])
def loaded():
    print(json.dumps(sorted(sys.modules)))
"""
TAKEN = """
from motet.cluster.commands.cli import main
try:
    main(["serve", str(demo / "base"), "--port", sys.argv[3], "--data-dir", str(folder)], standalone_mode=False)
except Exception as error:
    assert "cannot listen at 127.0.0.1" in str(error), error
else:
    raise AssertionError("the port is taken")
loaded()
"""
LAUNCHER = """
from motet.cluster.commands import cli, foreground, serve_command
from motet.cluster.config import MotetConfig
from motet.cluster.application import model_source, registration
from motet.cluster.launch import joined_cluster, launch, local_serve, preflight
from motet.cluster.launch.local_serve import free_ports, serve_environment, set_environment
limits = MotetConfig.of(model_path=demo / "base").edge
set_environment(serve_environment("test", folder, "127.0.0.1", limits))
from ray import cloudpickle
from motet.cluster.replicas.application import build_application
model_path = model_source.resolve_model(str(demo / "base"), folder, print)
config = MotetConfig.of(model_path=model_path, data_dir=folder, port=free_ports(1)[0], pool_bytes=64 << 20)
config = config.with_redis_url("redis://nowhere")
preflight.check_settings(config)
registration.identify_base(model_path, "demo")
assert config.num_cpus_of_a_gang == 1
routers = build_application(config, folder / "secrets", folder / "progress")
for deployment in (routers, routers._bound_deployment.init_args[2]):  # as Serve sends them to its controller
    cloudpickle.dumps(deployment._bound_deployment.func_or_class)
loaded()
"""
ROUTER = """
import asyncio
from motet.cluster.replicas import ingress
from motet.adapters.format.validation import validate
ingress.import_transformers_without_torch()
model = ingress.ModelConfig.from_folder(demo / "base")
layouts = ingress.layouts_of_gang(model, 2, 16, "bfloat16")
text = ingress.TextService.from_folder(demo / "base")
chat = [{"role": "user", "content": "hi"}]
prompt = asyncio.run(
    text.render_chat(chat, add_generation_prompt=True, continue_final_message=False, arguments={})
)
assert asyncio.run(text.encode_chat(prompt, add_special_tokens=False))
text.close()
source = demo / "adapters" / "shout"
config = (source / "adapter_config.json").read_bytes()
content = validate(config, source / "adapter_model.safetensors", layouts[0].shape)
store = ingress.AdapterStore(folder)
store.put(content, layouts)
assert store.load_packed(content.digest, layouts[1]).shape
loaded()
"""


def modules_of(code: str, folder: Path, *arguments: str) -> list[str]:
    """All that a fresh Python has loaded in the end."""
    command = [sys.executable, "-c", PREAMBLE + code, str(DEMO), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def those_of(modules: list[str], names: tuple[str, ...]) -> list[str]:
    return [module for module in modules if any(module == name or module.startswith(f"{name}.") for name in names)]


def test_a_taken_port_is_reported_before_anything_slow_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        modules = modules_of(TAKEN, tmp_path, str(taken.getsockname()[1]))
    assert "motet.cluster.commands.serve_command" in modules
    assert those_of(modules, SLOW) == []


def test_a_launcher_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    modules = modules_of(LAUNCHER, tmp_path)
    assert "ray.serve" in modules
    assert those_of(modules, (*HEAVY, "transformers")) == []


def test_a_router_loads_no_torch_and_no_model_code(tmp_path: Path) -> None:
    modules = modules_of(ROUTER, tmp_path)
    assert "transformers.models.auto.tokenization_auto" in modules
    assert those_of(modules, HEAVY) == []


@pytest.mark.parametrize("code", ["import torch", "import transformers.models.llama.modeling_llama"])
def test_what_is_loaded_would_be_seen(code: str, tmp_path: Path) -> None:
    assert those_of(modules_of(f"{code}\nloaded()", tmp_path), HEAVY) != []
