"""The table of docs/models.md, made of the families in workers/models/families.py.

.venv/bin/python -m motet.tests.rigs.made_models_page docs/models.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from motet.adapters.adapter import LATENT_EXPERT_MODULES
from motet.workers.models.families import FAMILIES, WRAPPERS
from motet.workers.models.family import Family

_BLOCK: Final = re.compile(r"(<!-- made: models -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS: Final = ("`architectures`", "`model_type`", "served", "LoRA on")
_RECURRENT: Final[Mapping[str | None, tuple[str, ...]]] = {
    None: (),
    "delta": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "grouped_delta": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "short_convolution": ("in_proj", "out_proj"),
    "mamba": ("in_proj", "out_proj"),
    "parallel_mamba": ("in_proj", "out_proj"),
}
_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_DENSE_KEYS: Final = {"first_k_dense_replace", "mlp_only_layers", "intermediate_size_mlp", "moe_layer_start_index"}
_SHARED_KEYS: Final = {"n_shared_experts", "moe_num_shared_experts", "intermediate_size_mlp", "moe_topk"} | {
    "shared_expert_intermediate_size"
}


def made_page(page: str) -> str:
    """The page as it should be."""
    rows = [
        (architecture, family.model_type, "all", _lora(family))
        for architecture, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower())
    ]
    rows += [
        (architecture, f"{wrapper.model_type}` of `{text.model_type}", "its text model", _lora(text))
        for architecture, wrapper in sorted(WRAPPERS.items(), key=lambda item: item[0].lower())
        for text in wrapper.texts
    ]
    head = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    lines = [f"| `{architecture}` | `{kind}` | {served} | {lora} |" for architecture, kind, served, lora in rows]
    table = "\n".join([*head, *lines])
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table}\n{block[2]}", page)


def _lora(family: Family) -> str:
    if family.experts is not None and not family.experts.beside_dense:
        return _lora_of_experts(family)
    recurrent = _RECURRENT[family.recurrent]
    linears = (name for name in _LINEARS if family.has_gates or name != "gate_proj")
    whole = {part: path.rpartition(".")[2] for path, parts in family.fused.items() for part in parts}
    leaves = {name: path.rpartition(".")[2] for name, path in family.paths.items()}
    names = ((whole.get(name) or leaves.get(name, name)) for name in linears)
    names = (name if name == "c_proj" else name.removesuffix("_proj") for name in names)
    experts = () if family.experts is None else ("gate, up, down of each expert", "and the router")
    return ", ".join(dict.fromkeys((*names, *recurrent, *experts)))


def _lora_of_experts(family: Family) -> str:
    assert family.experts is not None
    attention: tuple[str, ...] = ("q", "k", "v", "o")
    if family.is_latent:
        attention = ("q_a and q_b or q", "kv_a_proj_with_mqa", "kv_b", "o")
    attention = (*attention, *_RECURRENT[family.recurrent])
    ups = "gate, up" if family.experts.gate else "up"
    parts = [f"{ups}, down of each expert"]
    if family.experts_beside:
        parts = ["gate, up, down, those of all experts (`target_parameters`), the linears of per-layer embeddings"]
    if family.experts.are_fused:
        parts = ["gate_up, down of all experts (`target_parameters`)"]
    if family.has_halves or _DENSE_KEYS & family.defaults.keys():
        parts.append("of dense layers")
    if _SHARED_KEYS & family.defaults.keys():
        parts.append("of the shared expert" + (" and its gate" if family.experts.shared_gate else ""))
    if "moe_latent_size" in family.defaults:
        parts += LATENT_EXPERT_MODULES
    return f"{', '.join(attention)}, {', '.join(parts)}, and the router"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(made_page(path.read_text()))
