"""What a base multiplies inputs and outputs of its linears by (Falcon-H1), read from config.json.

Weights are kept multiplied so, biases by what their outputs are, and B of adapters as the weights: nothing is left to
multiply then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .recurrent_config import MambaConfig, RecurrentConfig

Runs = tuple[tuple[int, float], ...]  # numbers of outputs, and their factor


@dataclass(frozen=True)
class ModuleScales:
    """By module; others are not multiplied."""

    weights: Mapping[str, Runs]
    biases: Mapping[str, Runs]

    @staticmethod
    def from_values(
        values: Mapping[str, Any], modules: Mapping[str, tuple[int, int]], recurrent: RecurrentConfig | None
    ) -> ModuleScales | None:
        """Of a base whose family reads these keys; None: nothing is multiplied. Raises ValueError."""
        if "ssm_multipliers" not in values:
            return None
        assert isinstance(recurrent, MambaConfig)
        gate, down = _numbers(values, "mlp_multipliers", 2)
        attention, ssm = values["attention_in_multiplier"], values["ssm_in_multiplier"]
        inputs = {"q_proj": attention, "k_proj": attention, "v_proj": attention, "in_proj": ssm}
        outputs = {
            "k_proj": values["key_multiplier"],
            "o_proj": values["attention_out_multiplier"],
            "gate_proj": gate,
            "down_proj": down,
            "out_proj": values["ssm_out_multiplier"],
        }
        biases: dict[str, Runs] = {name: ((modules[name][1], float(factor)),) for name, factor in outputs.items()}
        states = recurrent.num_groups * recurrent.state_size
        counts = recurrent.width, recurrent.width, states, states, recurrent.num_heads
        biases["in_proj"] = tuple(zip(counts, _numbers(values, "ssm_multipliers", 5), strict=True))
        weights = {name: biases.get(name, ((modules[name][1], 1.0),)) for name in inputs | outputs}
        for name, factor in inputs.items():
            weights[name] = tuple((count, each * float(factor)) for count, each in weights[name])
        return ModuleScales(_without_ones(weights), _without_ones(biases))


def _numbers(values: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    numbers = values[key] or (1.0,) * count
    if len(numbers) != count:
        raise ValueError(f"{key} has {len(numbers)} numbers: {count} are needed")
    return tuple(float(number) for number in numbers)


def _without_ones(scales: Mapping[str, Runs]) -> dict[str, Runs]:
    return {name: runs for name, runs in scales.items() if any(factor != 1.0 for _, factor in runs)}
