"""The device as a setting, and which tensors are on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from motet.cluster.config import MotetConfig
from motet.cluster.replicas.application import _place_of_a_gang
from motet.kernels import pages
from motet.kernels.attention import AttentionBatch
from motet.kernels.gpu import flash_attention
from motet.kernels.gpu.flash_attention import FlashAttention, FlashPackage, find_flash_attention
from motet.kernels.plain.attention import paged_attention
from motet.workers import device_probe
from motet.workers.device import resolve_device
from motet.workers.device_probe import DeviceFacts
from motet.workers.execution.device_rows import make_inputs
from motet.workers.plan import SequencePlan, StepPlan, packed

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
CPU = torch.device("cpu")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with_gpu(monkeypatch)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cpu") == CPU


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(ValueError, match=r"device = 'cuda': torch sees no NVIDIA GPU here .*or device cpu"):
        resolve_device("cuda")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device = 'tpu': cpu, cuda or auto is accepted"):
        MotetConfig.of(model_path=BASE, data_dir=tmp_path, device="tpu")


@pytest.mark.parametrize("degree", [1, 2])
def test_each_worker_takes_a_gpu_of_its_own(degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = MotetConfig.of(model_path=BASE, data_dir=tmp_path, tensor_parallel=degree)
    monkeypatch.setattr(device_probe, "has_driver", lambda: False)
    assert "GPU" not in str(_place_of_a_gang(served)).upper().replace("NUM_CPUS", "")
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setattr(device_probe, "probe_torch", lambda name: DeviceFacts("cuda", 1 << 30))
    place = _place_of_a_gang(served)
    if degree == 1:
        assert place["ray_actor_options"]["num_gpus"] == 1
    else:
        leader, *workers = place["placement_group_bundles"]
        assert "GPU" not in leader
        assert [worker["GPU"] for worker in workers] == [1, 1]


def test_inputs_go_to_another_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = (
        SequencePlan(0, (5, 6, 7), 0, packed([3]), None, None),
        SequencePlan(1, (8,), 20, packed([1, 4, 0]), None, None),
    )
    here = make_inputs(StepPlan(1, plans, (), ()), {}, 8, CPU)
    copies = []
    copied: Callable[..., torch.Tensor] = torch.Tensor.to

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copies.append(tensor.numel())
        return copied(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    there = make_inputs(StepPlan(1, plans, (), ()), {}, 8, torch.device("meta"))
    assert len(copies) == 1
    for ours, theirs in ((here.token_ids, there.token_ids), (here.attention.pages, there.attention.pages)):
        assert (theirs.device.type, theirs.shape, theirs.dtype) == ("meta", ours.shape, ours.dtype)


@pytest.mark.parametrize("targets", [(4, 5, 6, 1, 2, 9), (7,), (3, 2, 1, 0)])
def test_runs_of_pages_are_copied_as_pages_are(targets: tuple[int, ...]) -> None:
    content = torch.randn(len(targets), 2, 3)
    pool, twin = torch.zeros(10, 2, 3), torch.zeros(10, 2, 3)
    pages.copy_runs(pool, targets, content)
    pages.write_pages(twin, targets, content)
    assert torch.equal(pool, twin)


def flash_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    fa_version: int,
) -> torch.Tensor:
    """The interface of vllm-flash-attn, computed as it is documented: int32 lengths and tables, strided pages."""
    assert causal and fa_version == (3 if q.shape[2] in (64, 96, 128, 192, 256) else 2)
    assert {x.dtype for x in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
    assert k.shape[1] % 16 == 0 and k.stride(-1) == 1 and q.is_contiguous()
    assert max_seqlen_k >= int(seqused_k.max()) and max_seqlen_q == int(cu_seqlens_q.diff().max())
    out = torch.empty_like(q)
    for index, length in enumerate(seqused_k.tolist()):
        rows = slice(*cu_seqlens_q[index : index + 2].tolist())
        keys, values = (x[block_table[index].long()].flatten(0, 1)[:length].double() for x in (k, v))
        group = q.shape[1] // k.shape[2]
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys.repeat_interleave(group, 1)) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        num_rows = scores.shape[1]
        behind = torch.arange(length - num_rows, length).unsqueeze(1) - torch.arange(length)
        hidden = (behind < 0) | ((behind > window_size[0]) if window_size[0] >= 0 else torch.tensor(False))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).to(q.dtype)
    return out


def attention_case(
    counts: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """q, a layer's KV and the batch of `(old tokens, new ones)`."""
    plans, free = [], iter(range(3, 100))
    for index, (old, new) in enumerate(counts):
        held = tuple(next(free) for _ in range(-(-(old + new) // 16)))
        plans.append(SequencePlan(index, (0,) * new, old, packed(held), None, None))
    batch = make_inputs(StepPlan(1, tuple(plans), (), ()), {}, 16, CPU).attention
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(100, 2, 2, 16, 2, 32, generator=generator).to(dtype)[:, 1]
    return torch.randn(batch.query_starts[-1], 8, 32, generator=generator).to(dtype), kv, batch


@pytest.mark.parametrize("counts", [[(0, 1), (33, 1), (15, 1)], [(30, 1), (0, 20), (16, 3)]], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 20.0)])
def test_flash_attention_is_called_in_its_own_terms(
    counts: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    q, kv, batch = attention_case(counts, torch.bfloat16)
    flash = FlashAttention(FlashPackage("stand-in", flash_stand_in, (3, 2)), _refuse)
    for _ in range(2):  # the second time with what the first one worked out
        actual = flash.paged_attention(q, kv, batch, 0.2, window, softcap)
        expected = paged_attention(q.float(), kv.float(), batch, 0.2, window, softcap)
        torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)  # bfloat16's 8 bits


def test_what_flash_attention_cannot_do_goes_elsewhere() -> None:
    q, kv, batch = attention_case([(3, 1)], torch.float32)
    flash = FlashAttention(FlashPackage("stand-in", _refuse, (2,)), paged_attention)
    torch.testing.assert_close(flash.paged_attention(q, kv, batch, 0.2, None), paged_attention(q, kv, batch, 0.2, None))
    q, kv, batch = attention_case([(3, 1)], torch.bfloat16)
    how = (q, kv, batch, 0.2, None, None, torch.ones(8))
    torch.testing.assert_close(flash.paged_attention(*how), paged_attention(*how))


@pytest.mark.parametrize(
    ("head_dim", "hopper", "ampere"),
    [(64, 3, 2), (80, 2, 2), (96, 3, 2), (112, 2, 2), (128, 3, 2), (256, 3, 2), (100, None, None), (288, None, None)],
)
def test_each_size_of_heads_gets_a_version_that_is_built_for_it(
    head_dim: int, hopper: int | None, ampere: int | None
) -> None:
    assert FlashPackage("stand-in", _refuse, (3, 2)).version_for(head_dim) == hopper
    assert FlashPackage("stand-in", _refuse, (2,)).version_for(head_dim) == ampere


INTERFACE = (
    "def flash_attn_varlen_func(): ...\ndef is_fa_version_supported(version, device=None): return version in {}\n"
)


@pytest.mark.parametrize(
    ("module", "hopper", "ampere", "warning"),
    [
        (INTERFACE.format("(2, 3)"), (3, 2), (2,), ""),
        (INTERFACE.format("(2,)"), (2,), (2,), ""),
        (INTERFACE.format("(3,)"), (3,), None, "no FlashAttention for compute capability 8.0"),
        ("raise RuntimeError('its library is built for another driver')", None, None, "built for another driver"),
        ("import motet_missing_library", None, None, "No module named 'motet_missing_library'"),
        ("def flash_attn_varlen_func(): ...", None, None, "is_fa_version_supported"),
    ],
)
def test_flash_attention_is_used_where_it_says_that_it_runs(
    module: str,
    hopper: tuple[int, ...] | None,
    ampere: tuple[int, ...] | None,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flash_attention, "PACKAGES", ("motet_no_such_package", "motet_flash_stand_in"))
    monkeypatch.delitem(sys.modules, "motet_flash_stand_in", raising=False)
    assert find_flash_attention((9, 0)) is None and not caplog.records, "what is not installed is no news"
    (tmp_path / "motet_flash_stand_in.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    found = [find_flash_attention(capability) for capability in ((9, 0), (8, 0))]
    assert [package and package.versions for package in found] == [hopper, ampere]
    if hopper == (3, 2):
        assert found[0] is not None and found[0].name == "motet_flash_stand_in (FA3, FA2)"
    assert warning in caplog.text and bool(warning) == bool(caplog.records)


def _refuse(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("this was not to be called")
