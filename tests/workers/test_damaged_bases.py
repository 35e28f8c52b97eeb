"""Whatever is wrong with a base's files, the error names what it is: a tensor, a file, a key of config.json."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.tests.rigs.oracle import VARIANTS, WRAPPED, write_model
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.stored_tensor import named_in_full
from motet.workers.models.weights import Checkpoint

NUM_TENSORS = 5  # of each base, in CI
_EXPERT = re.compile(r"layers\.\d+\.(\w+\.)?experts\.\w+(\.\w+)?")
NO_PART = ("vision", "visual", "multi_modal_projector", "audio_tower", "mtp.", "rotary_emb")  # of a text model


@pytest.fixture(scope="module", params=[*VARIANTS, *WRAPPED])
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder, and the tensors of its one file."""
    folder = write_model(request.param, tmp_path_factory.mktemp(request.param) / "base")
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(stored, folder / "model.safetensors")
    return folder, stored


def _load(folder: Path) -> None:
    sharding = ModelSharding(ModelConfig.from_folder(folder))
    load_decoder(sharding, Checkpoint(folder, torch.float32, torch.device("cpu")))


def _with(base: Path, stored: Mapping[str, torch.Tensor], folder: Path) -> Path:
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    save_file(dict(stored), folder / "model.safetensors")
    return folder


def test_tensors_that_are_missing_or_misshapen_are_named(
    base: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, stored = base
    _load(folder)
    full = dict(zip(stored, named_in_full(stored), strict=True))
    names = [
        name for name in stored if not any(part in name for part in NO_PART) and not name.endswith("lm_head.weight")
    ]
    if not request.config.option.thorough:
        names = random.Random(request.config.option.first_seed).sample(names, NUM_TENSORS)
    for name in names:
        others = {other: tensor for other, tensor in stored.items() if other != name}
        with pytest.raises(ValueError, match=r"has no tensor|has no place for") as lacks:
            _load(_with(folder, others, tmp_path / "damaged"))
        assert _is_named(name, full[name], str(lacks.value)), (name, lacks.value)
        for tensor in _misshapen(stored[name]):
            with pytest.raises(ValueError) as misshapen:
                _load(_with(folder, others | {name: tensor}, tmp_path / "damaged"))
            assert _is_named(name, full[name], str(misshapen.value)), (name, misshapen.value)


def _misshapen(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """With more rows, with more columns, and transposed."""
    if not tensor.dim():
        yield torch.ones(2)
        return
    yield torch.cat([tensor, tensor[:1]])
    if tensor.dim() > 1:
        yield torch.cat([tensor, tensor[..., :1]], -1)
        if tensor.shape[-1] != tensor.shape[-2]:
            yield tensor.transpose(-1, -2).contiguous()


def _is_named(stored: str, full: str, words: str) -> bool:
    """By its whole name in the file, by what its name in full ends with within its layer, without `.weight`, or, one
    of experts, by its layer and expert, too."""
    expert = _EXPERT.search(full)
    return (
        stored in words or (full.removesuffix(".weight").rpartition(".")[2] if expert is None else expert[0]) in words
    )


def test_tensors_without_a_place_are_named(base: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, stored = base
    prefix = next(name for name in stored if "layers.0." in name and "vision" not in name).partition("layers.0.")[0]
    extra = {f"{prefix}layers.0.self_attn.extra.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"no place for: .*self_attn\.extra\.weight"):
        _load(_with(folder, stored | extra, tmp_path / "damaged"))


def test_a_missing_config_and_an_unknown_quantisation_are_named(
    base: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, stored = base
    damaged = _with(folder, stored, tmp_path / "damaged")
    raw = json.loads((folder / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "unheard-of"}}))
    with pytest.raises(ValueError, match=r"'unheard-of' is not supported"):
        ModelConfig.from_folder(damaged)
    (damaged / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelConfig.from_folder(damaged)
