"""The checks that `motet serve` makes of its settings before it starts anything."""

from __future__ import annotations

import errno
import shutil
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from motet.cluster.config import MotetConfig
from motet.cluster.launch import preflight
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.preflight import check_data_dir, check_settings
from motet.cluster.serve_application import build
from motet.cluster.settings.setting_field import ConfigError
from motet.kernels.gpu.float8 import _MULTIPLE
from motet.tests.rigs.oracle import write_model
from motet.workers import device_probe
from motet.workers.config import FLOAT8_MULTIPLE
from motet.workers.device_probe import DeviceFacts
from motet.workers.models.config import ModelConfig

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


def config(tmp_path: Path, model_path: Path = BASE, **given: Any) -> MotetConfig:
    return MotetConfig.of(
        model_path=model_path, data_dir=tmp_path, port=free_ports(1)[0], **{"pool_bytes": 64 << 20, **given}
    )


def test_good_settings_need_no_words(tmp_path: Path) -> None:
    assert check_settings(config(tmp_path)) == []


def test_a_disk_with_few_free_bytes_is_said_before_the_start(tmp_path: Path) -> None:
    (warning,) = check_settings(config(tmp_path, min_free_bytes=1 << 60))
    assert "less than --min-free-bytes" in warning


def test_a_data_folder_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file can still be made there."""

    class Full(BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(ConfigError, match=r"--data-dir.*No space left on device"):
        check_data_dir(tmp_path)


@pytest.mark.parametrize(("pool_bytes", "reason"), [(1, "one page"), (1 << 60, "of memory")])
def test_a_pool_that_cannot_be(tmp_path: Path, pool_bytes: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--pool-bytes.*{reason}"):
        check_settings(config(tmp_path, pool_bytes=pool_bytes))


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ValueError("device = 'cuda': torch sees no NVIDIA GPU here")
    monkeypatch.setattr(device_probe, "probe_torch", Mock(side_effect=refusal))
    with pytest.raises(ValueError, match="torch sees no NVIDIA GPU here"):
        check_settings(config(tmp_path, device="cuda"))


def test_the_pool_of_a_gpu_is_measured_by_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 30))
    assert check_settings(config(tmp_path, max_gangs=8, pool_bytes=900 << 20)) == []  # a GPU for each
    with pytest.raises(ConfigError, match=r"--pool-bytes.*a GPU here has 1 GiB"):
        check_settings(config(tmp_path, pool_bytes=2 << 30))
    assert check_settings(config(tmp_path, gang_num_gpus=0.8, pool_bytes=None)) == []  # no other process uses that GPU
    thirds: dict[str, Any] = {"gang_num_gpus": 1 / 3, "pool_bytes": 400 << 20}
    assert check_settings(config(tmp_path, max_gangs=2, **thirds)) == []
    with pytest.raises(ConfigError, match=r"--pool-bytes.*a GPU here has 1 GiB"):
        check_settings(config(tmp_path, max_gangs=9, **thirds))


def test_the_pool_of_a_gpu_need_not_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is known later; of a CPU the default, a share of its memory, is checked."""
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 20))
    assert check_settings(config(tmp_path, pool_bytes=None)) == []
    assert check_settings(config(tmp_path, pool_bytes=None, device="cpu")) == []
    monkeypatch.setattr(preflight, "usable_memory_bytes", lambda: 8 << 10)
    with pytest.raises(ConfigError, match=r"--pool-bytes = '512'.*one page of this model takes"):
        check_settings(config(tmp_path, pool_bytes=None, device="cpu", max_gangs=2))


def test_float32_is_refused_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 40))
    with pytest.raises(ConfigError, match=r"--dtype.*float32 is not served on a GPU"):
        check_settings(config(tmp_path, dtype="float32"))
    assert check_settings(config(tmp_path, dtype="float32", device="cpu")) == []


def test_weights_of_eight_bits_are_for_dense_bases_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--weights-dtype = 'float8': .* CPUs serve those of dtype"):
        check_settings(config(tmp_path, weights_dtype="float8", device="cpu"))
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 40))
    assert check_settings(config(tmp_path, weights_dtype="float8")) == []
    model = write_model("mixtral", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--weights-dtype = 'float8': .* this one has experts"):
        check_settings(config(tmp_path, model, weights_dtype="float8"))


def test_weights_of_eight_bits_need_a_gpu_that_multiplies_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 40, (8, 9)))
    with pytest.raises(ConfigError, match=r"--weights-dtype = 'float8': this GPU has the compute capability 8\.9"):
        check_settings(config(tmp_path, weights_dtype="float8"))


def test_parts_that_a_gpu_does_not_multiply_with_eight_bits(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", intermediate_size=48)
    served = config(tmp_path, model, weights_dtype="float8", gang_num_gpus=1.0, address="auto", dtype="bfloat16")
    assert check_settings(served) == []
    with pytest.raises(ConfigError, match=r"each of 2 workers has a linear with 24 inputs .*multiples of 16"):
        check_settings(served.replaced(tensor_parallel=2))
    assert FLOAT8_MULTIPLE == _MULTIPLE


def test_a_degree_that_does_not_divide_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel = 7: a gang of 7 workers cannot share"):
        check_settings(config(tmp_path, tensor_parallel=7))


def test_a_worker_of_a_gang_has_its_own_share_of_each_token(tmp_path: Path) -> None:
    """So that the same pool holds more of them."""
    (alone,) = check_settings(config(tmp_path, pool_bytes=128 << 10))
    (together,) = check_settings(config(tmp_path, pool_bytes=128 << 10, tensor_parallel=2))
    assert tokens_in(together) == 2 * tokens_in(alone)


def tokens_in(warning: str) -> int:
    return int(warning.removeprefix("the pool holds ").split()[0])


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ({"device": "cpu", "weights_dtype": "float8"}, "--weights-dtype", "CPUs serve those of dtype"),
        ({"device": "cpu", "kv_dtype": "float8"}, "--kv-dtype", "CPUs serve that of dtype"),
        ({"device": "cuda", "dtype": "float32"}, "--dtype", "float32 is not served on a GPU"),
        ({"gang_num_gpus": 1.0, "dtype": "float32"}, "--dtype", "float32 is not served on a GPU"),
        ({"gang_num_gpus": 0.5, "pool_bytes": None}, "--gang-num-gpus", "give --pool-bytes, with which all fit"),
        ({"gang_num_gpus": 0.5, "tensor_parallel": 2}, "--gang-num-gpus", "the workers of a gang need a GPU each"),
    ],
)
def test_what_no_node_could_serve_is_refused_wherever_it_is_to_run(
    tmp_path: Path, given: dict[str, Any], key: str, reason: str, address: str | None
) -> None:
    """Without a look at any node: an application that a cluster deploys by itself is refused as it is built."""
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, address=address, **given)
    assert caught.value.key == key and reason in str(caught.value)
    if address is not None:
        args = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
        with pytest.raises(ConfigError, match=reason):
            build({"model": str(BASE), **args})


def test_kv_of_eight_bits_is_for_gpus_and_heads_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--kv-dtype = 'float8': .* CPUs serve that of dtype"):
        check_settings(config(tmp_path, kv_dtype="float8", device="cpu"))
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 40))
    model = ModelConfig.from_folder(BASE)
    values = model.num_layers * 16 * 2 * model.num_kv_heads * model.head_dim
    page_bytes = values + values // model.head_dim * 4
    assert check_settings(config(tmp_path, kv_dtype="float8")) == []
    with pytest.raises(ConfigError, match=rf"--pool-bytes.* one page of this model takes {page_bytes} bytes"):
        check_settings(config(tmp_path, kv_dtype="float8", pool_bytes=page_bytes - 1))
    with pytest.raises(ValueError, match=r"kv_dtype = 'float8': .* heads of 24 .* a multiple of 16"):
        check_settings(config(tmp_path, write_model("gemma2", tmp_path / "model"), kv_dtype="float8"))


def test_what_is_served_otherwise_than_requested_is_reported(tmp_path: Path) -> None:
    (short,) = check_settings(config(tmp_path, pool_bytes=64 << 10))
    assert "--pool-bytes" in short
    (long,) = check_settings(config(tmp_path, max_model_len=1 << 30))
    assert long.startswith("--max-model-len 1073741824 is more than")
    (many,) = check_settings(config(tmp_path, max_num_sequences=1000))
    assert many.startswith("--max-num-sequences 1000 is more than the tokens of a step: 512 run at once")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        check_settings(config(tmp_path, model))


def test_a_data_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        check_data_dir(tmp_path / "file" / "data")


def test_the_base_is_named_as_an_adapter_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name"):
        config(tmp_path, name="two words")
