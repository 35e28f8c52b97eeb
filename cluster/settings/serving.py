"""Settings: what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_name
from ...adapters.packing.layout import Dtype
from ...workers.config import Device, KVDtype, SlowKernels, SmallSums, WeightsDtype
from .setting import Count, Folder, Refusal, Setting
from .setting_field import SettingGroup


def check_base_name(name: str) -> Refusal | None:
    if not name:
        return None
    try:
        check_name(name)
    except AdapterInvalid as error:
        return name, f"{error}; choose another with --name"
    return None


class Serving(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to serve."""

    name: Annotated[
        str, Setting("The base's name in requests.", unset="the name of the model's folder", check=check_base_name)
    ] = ""
    device: Annotated[
        Device, Setting("What gangs compute on. auto: an NVIDIA GPU for each worker where there is one.")
    ] = "auto"
    dtype: Annotated[Dtype, Setting("Type of the weights, of the KV and of packed adapters.")] = "bfloat16"
    weights_dtype: Annotated[
        WeightsDtype,
        Setting(
            "Type of the weights of the layers' linears. dtype: that of --dtype. float8: half the memory, quantised as "
            "the base is read, and inputs in each step; for dense bases on GPUs of compute capability 9.0 or more."
        ),
    ] = "dtype"
    kv_dtype: Annotated[
        KVDtype,
        Setting(
            "Type of the KV. dtype: that of --dtype. float8: little more than half the memory, quantised as each token "
            "is computed; for GPUs of compute capability 9.0 or more. Adapters are packed for it."
        ),
    ] = "dtype"
    max_model_len: Annotated[
        Count | None,
        Setting("The most tokens of a prompt and its completion together.", "live", unset="the model's"),
    ] = None
    data_dir: Annotated[
        Folder, Setting("Holds adapters, the registry and downloaded models.", env="MOTET_DATA_DIR")
    ] = Path("~/.local/share/motet")
    cache_path: Annotated[
        Folder | None,
        Setting(
            "Keeps kernels that were compiled for a machine.",
            unset="motet in XDG_CACHE_HOME, or .cache/motet in the user's home",
        ),
    ] = None
    small_sums: Annotated[
        SmallSums,
        Setting(
            "How the GPUs of a gang sum their parts of a decode step: each by one kernel that reads the others' "
            "memory, if they can, or by NCCL like all larger sums."
        ),
    ] = "one-shot"
    slow_kernels: Annotated[
        SlowKernels,
        Setting(
            "Whether a gang may compute with plain kernels, many times slower, if the fast ones are not available.",
            env="MOTET_SLOW_KERNELS",
        ),
    ] = "allow"
