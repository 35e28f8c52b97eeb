from __future__ import annotations

import json
import pickle
import random
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import EXPERT_MODULES, LATENT_MODULES, MODULES, BaseShape, ExpertShape
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.peft import parse_config
from motet.adapters.format.targets import resolve_targets
from motet.adapters.format.validation import max_header_bytes, validate
from motet.adapters.names import check_name, check_tenant
from motet.tests.rigs.lora_files import SHAPE, LoraFiles, lora_files, name_of
from motet.tests.rigs.tensor_twins import as_numpy, identical


def digest_of(files: LoraFiles, folder: Path) -> str:
    return validate(files.config_bytes, files.write(folder), SHAPE).digest


def write_raw(folder: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "raw.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_good_upload_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    files = lora_files(dtype=dtype)
    content = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    assert content.module_ranks == {"q_proj": 4, "v_proj": 4, "down_proj": 4}
    assert content.num_bytes == sum(tensor.nbytes for tensor in files.tensors.values())
    for (layer, module), found in content.matrices.items():
        assert identical(found.a, as_numpy(files.tensors[name_of(layer, module, "A")]))
        assert identical(found.b, as_numpy(files.tensors[name_of(layer, module, "B")]))
        assert found.scaling == 2.0


def test_the_digest_sees_content_only(tmp_path: Path) -> None:
    files = lora_files()
    digest = digest_of(files, tmp_path)
    infix = {name.replace(".weight", ".default.weight"): tensor for name, tensor in reversed(files.tensors.items())}
    same = [
        LoraFiles({**files.config, "base_model_name_or_path": "x", "inference_mode": True}, files.tensors),
        LoraFiles({**files.config, "target_modules": r".*(q|v|down)_proj"}, files.tensors),
        LoraFiles({**files.config, "r": 9, "rank_pattern": {".*": 4}}, files.tensors),
        LoraFiles({**files.config, "lora_alpha": 1, "alpha_pattern": {"q_proj|v_proj|down_proj": 8}}, files.tensors),
        LoraFiles({**files.config, "lora_alpha": 4, "use_rslora": True}, files.tensors),  # 4 / sqrt(4) = 8 / 4
        LoraFiles(files.config, infix),
    ]
    assert {digest_of(other, tmp_path) for other in same} == {digest}
    first = name_of(0, "q_proj", "A")
    different = [
        LoraFiles({**files.config, "lora_alpha": 9}, files.tensors),
        LoraFiles({**files.config, "alpha_pattern": {"layers.0.self_attn.q_proj": 9}}, files.tensors),
        LoraFiles(files.config, {**files.tensors, first: files.tensors[first].nextafter(torch.tensor(9.0))}),
        LoraFiles(files.config, {name: tensor.half().float() for name, tensor in files.tensors.items()}),
        LoraFiles(files.config, {name: tensor.half() for name, tensor in files.tensors.items()}),
        lora_files(modules=("q_proj", "v_proj")),
    ]
    assert len({digest, *(digest_of(other, tmp_path) for other in different)}) == 1 + len(different)


def test_a_mixed_upload(tmp_path: Path) -> None:
    files = lora_files(rank=2, ranks={(1, "q_proj"): 5}, rank_pattern={"layers.1.self_attn.q_proj": 5}, use_rslora=True)
    content = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    assert content.module_ranks == {"q_proj": 5, "v_proj": 2, "down_proj": 2}
    assert content.matrices[1, "q_proj"].scaling == 8 / 5**0.5


Q = name_of(1, "q_proj", "A")
SPOILED: dict[str, tuple[dict[str, torch.Tensor | None], list[str]]] = {
    "missing": ({Q: None}, ["lacks", Q]),
    "extra module": ({name_of(0, "k_proj", "A"): torch.ones(4, 16)}, ["does not target", "k_proj"]),
    "extra layer": ({name_of(7, "q_proj", "A"): torch.ones(4, 16)}, ["does not have", "layers are 0 to", "layers.7"]),
    "rank": ({Q: torch.ones(5, 16)}, [Q, "[5, 16]", "[4, 16]"]),
    "in": ({Q: torch.ones(4, 17)}, [Q, "[4, 17]", "[4, 16]", "16 inputs"]),
    "transposed": ({Q: torch.ones(16, 4)}, [Q, "[16, 4]"]),
    "three dimensions": ({Q: torch.ones(4, 16, 1)}, ["[4, 16, 1]"]),
    "nan": ({Q: torch.full((4, 16), float("nan"))}, [Q, "NaN"]),
    "infinity": ({Q: torch.full((4, 16), float("-inf")).bfloat16()}, [Q, "infinity"]),
    "integers": ({Q: torch.ones(4, 16, dtype=torch.int32)}, ["I32", "F32, F16, BF16"]),
    "bytes": ({Q: torch.ones(4, 16, dtype=torch.uint8)}, ["U8", "F32, F16, BF16, F64"]),
    "beyond float32": ({Q: torch.full((4, 16), 1e300, dtype=torch.float64)}, [Q, "infinity"]),
    "wrapped twice": ({Q.replace("model.model", "model._orig_mod.model"): torch.ones(4, 16)}, [Q, "under two names"]),
    "two kinds of names": ({Q.replace("model.model", "model").replace("0.", "1."): torch.ones(4, 16)}, ["two ways"]),
    "empty": ({Q: torch.ones(0, 16)}, ["holds nothing"]),
    "dora": ({Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(4)}, ["DoRA"]),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}, ["embed_tokens"]),
    "trained embeddings": ({"base_model.model.model.embed_tokens.weight": torch.ones(4, 4)}, ["cannot be trained"]),
    "modules to save": ({"base_model.model.lm_head.modules_to_save.weight": torch.ones(2)}, ["cannot be trained"]),
    "a norm": ({"base_model.model.model.norm.modules_to_save.weight": torch.ones(2)}, ["modules_to_save"]),
    "lora bias": ({Q.replace("lora_A.weight", "lora_B.bias"): torch.ones(16)}, ["lora_bias"]),
    "bias": ({"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(16)}, ["biases"]),
    "stranger": ({"something": torch.ones(1)}, ["something", "lora_A"]),
    "doubled": ({Q.replace(".weight", ".default.weight"): torch.ones(4, 16)}, ["holds a matrix twice"]),
}


@pytest.mark.parametrize("case", SPOILED)
def test_refuses_wrong_tensors_by_name(case: str, tmp_path: Path) -> None:
    changes, named = SPOILED[case]
    files = lora_files()
    files.tensors = {name: tensor for name, tensor in {**files.tensors, **changes}.items() if tensor is not None}
    with pytest.raises(AdapterInvalid) as refusal:
        digest_of(files, tmp_path)
    assert all(part in str(refusal.value) for part in named), str(refusal.value)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        (b"", b"", "JSON"),
        (b"[]", b"", "object"),
        (b'{"a":{},"a":{}}', b"", "twice"),
        ({"a": F32}, b"1234", "truncated"),
        ({"a": F32}, b"123456789", "after its last tensor"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"1" * 12, "overlaps"),
        ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"1" * 20, "gap"),
        ({"a": {**F32, "shape": [3]}}, b"1" * 8, "by its shape"),
        ({"a": {**F32, "shape": [-2]}}, b"1" * 8, "list of sizes"),
        ({"a": {**F32, "shape": [1 << 61, 1 << 61]}}, b"1" * 8, "by its shape"),
        ({"a": {**F32, "shape": [True, 2]}}, b"1" * 8, "list of sizes"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, b"1" * 8, "by its offsets"),
        ({"a": {**F32, "dtype": ["F32"]}}, b"1" * 8, "dtype"),
        ({"a": {**F32, "extra": 1}}, b"1" * 8, "are needed"),
        ({"a": 5}, b"", "are needed"),
    ],
)
def test_refuses_a_wrong_header(header: Any, data: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid) as refusal:
        validate(lora_files().config_bytes, write_raw(tmp_path, header, data), SHAPE)
    assert named in str(refusal.value)


EXPERTS_PATH = "base_model.model.model.layers.1.mlp."
EXPERTS_SHAPE = BaseShape(
    SHAPE.num_layers,
    {module: SHAPE.modules[module] for module in MODULES[:4]} | dict.fromkeys(EXPERT_MODULES, (16, 16)),
    ExpertShape(4, (1,), "mlp", {module: module.partition(".")[2] for module in EXPERT_MODULES}),
)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (f"{EXPERTS_PATH}experts.4.gate_proj.lora_A.weight", "adapter_config.json does not target"),
        (f"{EXPERTS_PATH.replace('1', '0')}experts.3.gate_proj.lora_A.weight", "adapter_config.json does not target"),
        (
            "base_model.model.model.layers.1.block_sparse_moe.experts.0.w1.lora_B.weight",
            "not a LoRA matrix of this base",
        ),
        (f"{EXPERTS_PATH}shared_expert.up_proj.lora_A.weight", "not a LoRA matrix of this base"),
        (f"{EXPERTS_PATH}shared_expert_gate.lora_A.weight", "not a LoRA matrix of this base"),
        (f"{EXPERTS_PATH}gate_proj.lora_A.weight", "not a LoRA matrix of this base"),
        (f"{EXPERTS_PATH}experts.3.gate_proj.lora_A.weight", "adapter_config.json does not target"),
    ],
)
def test_a_base_with_experts_takes_adapters_of_attention_and_experts(name: str, named: str, tmp_path: Path) -> None:
    files = lora_files(modules=("q_proj", "o_proj"))
    content = validate(files.config_bytes, files.write(tmp_path), EXPERTS_SHAPE)
    assert content.module_ranks == {"q_proj": 4, "o_proj": 4}
    files.tensors[name] = torch.ones(4, 16)
    with pytest.raises(AdapterInvalid) as refusal:
        validate(files.config_bytes, files.write(tmp_path), EXPERTS_SHAPE)
    assert name in str(refusal.value)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (pickle.dumps({"a": 1}), "pickle, which is never read"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
    ],
)
def test_another_format_under_the_right_name_is_called_by_its_own(data: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "tensors").write_bytes(data)
    with pytest.raises(AdapterInvalid, match=f"is not a safetensors file but .*{named}"):
        validate(lora_files().config_bytes, tmp_path / "tensors", SHAPE)


@pytest.mark.parametrize("beginning", [b"\x80\x02\x01", b"\x80\x04\x01", b"\x1f\x8b\x00"])
def test_a_header_may_have_a_length_that_looks_like_another_format(beginning: bytes, tmp_path: Path) -> None:
    files = lora_files()
    path, num_bytes = files.write(tmp_path), int.from_bytes(beginning, "little")
    expected = validate(files.config_bytes, path, SHAPE).digest
    (length,), data = struct.unpack("<Q", path.read_bytes()[:8]), path.read_bytes()[8:]
    path.write_bytes(struct.pack("<Q", num_bytes) + data[:length].ljust(num_bytes) + data[length:])
    assert validate(files.config_bytes, path, SHAPE).digest == expected


def test_a_file_of_torch_save_is_called_so(tmp_path: Path) -> None:
    torch.save({Q: torch.ones(4, 16)}, tmp_path / "tensors")
    with pytest.raises(AdapterInvalid, match=r"but one of torch\.save \(pickle\), which is never read"):
        validate(lora_files().config_bytes, tmp_path / "tensors", SHAPE)


def test_float64_becomes_float32(tmp_path: Path) -> None:
    files = lora_files()
    expected = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    files.tensors = {name: tensor.double() for name, tensor in files.tensors.items()}
    (tmp_path / "wide").mkdir()
    assert validate(files.config_bytes, files.write(tmp_path / "wide"), SHAPE).digest == expected.digest


@pytest.mark.parametrize(
    ("place", "wrapper"),
    [
        ("base_model.", "module.base_model."),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("self_attn.", "_fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."),
        ("q_proj.", "q_proj._orig_mod."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model."),
    ],
)
def test_names_that_wrappers_leave_are_understood(place: str, wrapper: str, tmp_path: Path) -> None:
    files = lora_files()
    expected = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    files.tensors = {name.replace(place, wrapper): tensor for name, tensor in files.tensors.items()}
    (tmp_path / "wrapped").mkdir()
    assert validate(files.config_bytes, files.write(tmp_path / "wrapped"), SHAPE).digest == expected.digest


def test_a_name_that_matches_nothing_is_a_warning_unless_a_tensor_is_its(tmp_path: Path) -> None:
    files = lora_files()
    files.config["target_modules"] = [*files.config["target_modules"], "no_such_module", "out_proj"]
    content = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    (warning,) = content.warnings
    assert warning == "target_modules names no_such_module, which this base does not have: nothing is trained there"
    files.tensors[Q.replace("q_proj", "no_such_module")] = torch.ones(4, 16)
    with pytest.raises(AdapterInvalid, match="no_such_module"):
        validate(files.config_bytes, files.write(tmp_path), SHAPE)


def test_a_layer_that_the_base_does_not_have_is_a_warning_unless_nothing_else_is_trained(tmp_path: Path) -> None:
    files = lora_files()
    num_layers = SHAPE.num_layers
    files.config["layers_to_transform"] = [*range(num_layers + 2), -1]
    (warning,) = validate(files.config_bytes, files.write(tmp_path), SHAPE).warnings
    layers = f"layer {num_layers}, layer {num_layers + 1}, layer -1"
    assert warning == f"layers_to_transform names {layers}, which this base does not have: nothing is trained there"
    files.config["layers_to_transform"] = [num_layers]
    with pytest.raises(
        AdapterInvalid, match=f"layers_to_transform names layers {num_layers}: the base has layers 0 to"
    ):
        validate(files.config_bytes, files.write(tmp_path), SHAPE)


def test_targets_of_experts_are_those_of_the_layers_that_have_them() -> None:
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["gate_proj"], "rank_pattern": {"experts.2.gate_proj": 5}}
    targets = resolve_targets(parse_config(json.dumps(config).encode()), EXPERTS_SHAPE)
    ranks = {key: target.rank for key, target in targets.items()}
    assert ranks == {(1, f"experts.{expert}.gate_proj"): 5 if expert == 2 else 2 for expert in range(4)}
    with pytest.raises(AdapterInvalid, match="target_modules = w1 matches no module of the base: q_proj"):
        resolve_targets(parse_config(json.dumps(config | {"target_modules": ["w1"]}).encode()), EXPERTS_SHAPE)


def test_a_list_for_all_bases_may_name_parts_of_what_is_one() -> None:
    shape = replace(SHAPE, fused={"qkv_proj": MODULES[:3], "gate_up_proj": MODULES[4:6]})
    config = {"peft_type": "LORA", "r": 2, "target_modules": [*MODULES]}
    targets = resolve_targets(parse_config(json.dumps(config).encode()), shape)
    assert {module for _, module in targets} == {"o_proj", "down_proj"}  # PEFT trains these
    with pytest.raises(AdapterInvalid, match="matches no module of the base"):
        resolve_targets(parse_config(json.dumps(config | {"target_modules": ["q_proj"]}).encode()), shape)


def test_a_list_for_all_bases_may_name_modules_of_other_bases() -> None:
    """As of latent attention, which has no k_proj: PEFT trains those that are there."""
    modules = {name: sides for name, sides in SHAPE.modules.items() if name not in ("q_proj", "k_proj", "v_proj")}
    shape = replace(SHAPE, modules=modules | dict.fromkeys(LATENT_MODULES, (8, 8)), paths={"o_proj": "mixer.out"})
    config = {"peft_type": "LORA", "r": 2, "target_modules": [*MODULES]}
    targets = resolve_targets(parse_config(json.dumps(config).encode()), shape)
    assert {module for _, module in targets} == {"gate_proj", "up_proj", "down_proj"}
    for names, message in (
        (["k_proj"], "matches no module of the base: out, gate_proj"),
        (["q_porj"], "matches no module of the base: out, gate_proj"),
    ):
        with pytest.raises(AdapterInvalid, match=message):
            resolve_targets(parse_config(json.dumps(config | {"target_modules": names}).encode()), shape)


MANY_EXPERTS = BaseShape(  # as of Qwen3-30B-A3B
    48,
    dict.fromkeys(MODULES[:4], (8, 8)) | dict.fromkeys(EXPERT_MODULES, (8, 8)),
    ExpertShape(128, tuple(range(48)), "mlp", {module: module.partition(".")[2] for module in EXPERT_MODULES}),
)


def test_a_header_is_as_long_as_the_adapters_of_the_base_can_need(tmp_path: Path) -> None:
    assert SHAPE.num_matrices == 2 * 7 * 3
    assert EXPERTS_SHAPE.num_matrices == 2 * (4 * 3 + 3 * 4 * 1)
    assert MANY_EXPERTS.num_matrices == 2 * 48 * (4 + 3 * 128) > 37_000
    needed = MANY_EXPERTS.num_matrices * len(
        '"base_model.model.model.layers.47.mlp.experts.127.gate_proj.lora_A.default.weight":{"dtype":"BF16",'
        '"shape":[256,4096],"data_offsets":[1234567890,1234567890]},'
    )
    assert needed < max_header_bytes(MANY_EXPERTS)
    at_most = max_header_bytes(SHAPE)
    assert at_most < 256 << 10
    files = lora_files(modules=("q_proj",))
    path = files.write(tmp_path)
    header_bytes, *_ = struct.unpack("<Q", path.read_bytes()[:8])
    header, data = path.read_bytes()[8 : 8 + header_bytes], path.read_bytes()[8 + header_bytes :]
    validate(files.config_bytes, write_raw(tmp_path, header.ljust(at_most), data), SHAPE)
    with pytest.raises(AdapterInvalid, match=f"header would take {at_most + 1} bytes, at most {at_most} are accepted"):
        validate(files.config_bytes, write_raw(tmp_path, header.ljust(at_most + 1), data), SHAPE)


def test_long_lists_of_names_are_not_compared_with_each_module() -> None:
    """One by one, 18,000 modules and 50,000 names would take minutes."""
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(1, 50_000)]
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "gate_proj"], "exclude_modules": names}
    config["rank_pattern"] = {f"layers.0.mlp.experts.{expert}.gate_proj": 3 + expert for expert in range(100)}
    config["layers_to_transform"] = [*range(48)] * 1_000
    began_s = time.process_time()
    targets = resolve_targets(parse_config(json.dumps(config).encode()), MANY_EXPERTS)
    assert time.process_time() - began_s < 10.0
    assert [key for key in targets if key[1] == "q_proj"] == [(0, "q_proj")]
    assert len(targets) == 1 + 48 * 128
    assert [targets[0, f"experts.{expert}.gate_proj"].rank for expert in (0, 99, 100)] == [3, 102, 2]
    assert targets[1, "experts.0.gate_proj"].rank == 2


def test_a_dense_base_takes_no_adapters_of_experts(tmp_path: Path) -> None:
    files = lora_files(modules=("q_proj",))
    files.tensors[f"{EXPERTS_PATH}experts.0.gate_proj.lora_A.weight"] = torch.ones(4, 16)
    with pytest.raises(AdapterInvalid, match=r"experts\.0\.gate_proj.*not a LoRA matrix of this base"):
        validate(files.config_bytes, files.write(tmp_path), SHAPE)


@pytest.mark.parametrize("data", [b"", b"1234", b"\x80\x02}q\x00.", b"PK\x03\x04" + b"0" * 99, b"\xff" * 99])
def test_refuses_what_is_no_safetensors_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(data)
    with pytest.raises(AdapterInvalid, match=r"adapter_model\.safetensors"):
        validate(lora_files().config_bytes, path, SHAPE)


def test_unaligned_tensors_are_read_right(tmp_path: Path) -> None:
    files = lora_files(modules=("q_proj",))
    header, data = {}, b""
    for name, tensor in files.tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    paths = []
    for spaces in range(4):
        text = json.dumps(header).encode() + b" " * spaces
        paths.append(validate(files.config_bytes, write_raw(tmp_path, text, data), SHAPE).digest)
    assert set(paths) == {digest_of(files, tmp_path)}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_flips=st.integers(0, 3), cut=st.integers(-1, 400))
def test_a_corrupted_file_is_refused_or_reads_as_what_it_says(seed: int, num_flips: int, cut: int) -> None:
    """Random damage to header or data causes no other error, and is never read as the undamaged content."""
    files = lora_files(modules=("q_proj",), rank=1)
    chooser = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = files.write(Path(folder))
        good = path.read_bytes()
        digest = validate(files.config_bytes, path, SHAPE).digest
        bad = bytearray(good)
        for _ in range(num_flips):
            bad[chooser.randrange(len(bad))] ^= 1 << chooser.randrange(8)
        if cut >= 0:
            del bad[len(bad) - min(cut, len(bad)) :]
        path.write_bytes(bad)
        header_end = 8 + struct.unpack("<Q", good[:8])[0]
        try:
            found = validate(files.config_bytes, path, SHAPE).digest
        except AdapterInvalid:
            assert bad != good
        else:
            assert len(bad) == len(good)
            assert (found == digest) == (bad[header_end:] == good[header_end:])


@pytest.mark.parametrize("name", ["a", "A-1.b_c", "0", "x" * 64])
def test_accepts_names(name: str) -> None:
    check_name(name, reserved={"base"})
    check_tenant(name)


@pytest.mark.parametrize("tenant", ["...", ".a", "a."])
def test_accepts_tenants_that_begin_or_end_with_a_point(tenant: str) -> None:
    check_tenant(tenant)


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "a/b/c", "a/", "/a", "a/.b", "a b", "a\n", "ä", "x" * 65, "a:b", "base", "\ud800", "a\0"]
)
def test_refuses_names(name: str) -> None:
    with pytest.raises(AdapterInvalid, match="name"):
        check_name(name, reserved={"base"})


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "{a}", "a:b", "a\n", ".", ".."])
def test_refuses_tenants(tenant: str) -> None:
    with pytest.raises(AdapterInvalid, match="tenant"):
        check_tenant(tenant)
