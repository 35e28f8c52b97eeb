"""Settings of routers: what is served, sizes of requests, and timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_name
from ...adapters.packing.layout import Dtype
from ...workers.config import Device, KVDtype, SamplingDefaults, SlowKernels, SmallSums, WeightsDtype
from .setting_field import (
    Bytes,
    BytesOrNone,
    Count,
    CountOrNone,
    Folder,
    Refusal,
    Seconds,
    Setting,
    SettingGroup,
    Texts,
    Unit,
)

# Settings: what is served.


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
            "the base is read, and inputs in each step; for dense bases on GPUs of compute capability 9.0 or more. "
            "int8: likewise, on CPUs."
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
    sampling_defaults: Annotated[
        SamplingDefaults,
        Setting(
            "What a request that leaves a sampling parameter open gets. model: temperature, top_k, top_p, min_p, "
            "repetition_penalty and, of chats, max_new_tokens of the model's generation_config.json. openai: nothing "
            "of that file.",
            "live",
        ),
    ] = "model"
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


# Settings: how large requests and uploads may be, and what is recorded of them.


def check_folders(folders: str) -> Refusal | None:
    for folder in folders.split(",") if folders else ():
        if not folder.startswith("/") or ".." in folder.split("/") or folder == "/":
            return folder, "absolute paths with commas between them are accepted, like /adapters/{tenant},/shared"
    return None


class Requests(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of requests, and what is recorded of them."""

    max_body_bytes: Annotated[
        Bytes | None,
        Setting(
            "Largest JSON body of a request.",
            "live",
            live_in="router",
            unset="what prompts that fill the context can take: 32 bytes a token and 256 KiB, at most 16 MiB",
        ),
    ] = None
    max_sequences_per_request: Annotated[
        Count,
        Setting(
            "Sequences that one request may ask for: its prompts times n. At /v1/embeddings, and where "
            "scores are computed, of its inputs, at most 2,048, so many are computed at once.",
            "live",
            live_in="router",
        ),
    ] = 128
    control_tokens: Annotated[
        Literal["prompts", "everywhere", "nowhere"],
        Setting(
            "Texts of requests that may write control tokens, such as `<|im_end|>`: prompts (of /v1/completions), "
            "everywhere (messages of chats, too) or nowhere. In others such a name is text.",
            "live",
        ),
    ] = "prompts"
    strict_requests: Annotated[
        bool,
        Setting(
            "Refuse requests with fields, tools or items of the history that would be left out. Else the header "
            "x-motet-warning names them.",
            "live",
            live_in="router",
        ),
    ] = False
    response_template: Annotated[
        str,
        Unit("NAME", "a name or a path"),
        Setting(
            "How the model writes its thoughts and tool calls: auto (its own response template, else what its chat "
            "template is known for), none (all of an answer is content), a format of docs/tools.md, or a file with a "
            "response template of transformers.",
            "live",
        ),
    ] = "auto"
    adapter_base: Annotated[
        Literal["any", "warn", "match"],
        Setting(
            "What becomes of uploads of adapters whose config names another base: any takes them, warn takes them and "
            "says so in the answer and in lists, match refuses them.",
            "live",
            live_in="router",
        ),
    ] = "warn"
    vision_lora: Annotated[
        Literal["refuse", "leave-out"],
        Setting(
            "What becomes of LoRA that changes how pictures are read, in adapters of a base of which the text model is "
            "served: refuse the adapter, or serve it without and say so in the upload's answer.",
            "live",
            live_in="router",
        ),
    ] = "refuse"
    unknown_adapter_fields: Annotated[
        Literal["refuse", "warn"],
        Setting(
            "What becomes of adapters whose adapter_config.json sets a field that PEFT does not have: refuse them, "
            "since it may change what they compute, or take them and say so in the upload's answer.",
            "live",
            live_in="router",
        ),
    ] = "refuse"
    adapter_folders: Annotated[
        str,
        Texts("FOLDERS", "absolute paths with commas between them"),
        Setting(
            "Folders, on each router's machine, that keys with the scope upload may load adapters from "
            "(/v1/load_lora_adapter). {tenant} in one stands for the tenant that asks; without it all tenants may.",
            "live",
            live_in="router",
            unset="none",
            check=check_folders,
        ),
    ] = ""
    base_aliases: Annotated[
        str,
        Texts("NAMES", "names with commas between them"),
        Setting(
            "More names of the base, beside --name: requests may use them, unless the tenant has an adapter of that "
            "name, and adapters may name them, as they may the model's folder and `_name_or_path` in its config.json.",
            "live",
            live_in="router",
            unset="none",
        ),
    ] = ""
    max_upload_bytes: Annotated[Bytes, Setting("Largest adapter_model.safetensors that is accepted.", "live")] = 2 << 30
    file_days: Annotated[
        Count,
        Setting("Days after which files, and batches that have ended, are removed.", "live", live_in="router"),
    ] = 30
    response_days: Annotated[
        CountOrNone,
        Setting(
            "Days for which answers of /v1/responses are stored, with their conversations, unless a request says "
            "store: false. 0: none is, and what needs one is refused.",
            "live",
            live_in="router",
        ),
    ] = 0
    max_batch_lines: Annotated[
        Count,
        Setting("Lines of batches that a router has under way at once, shared by tenants.", "live", live_in="router"),
    ] = 32
    min_free_bytes: Annotated[BytesOrNone, Setting("Disk that uploads leave to the registry and the logs.", "live")] = (
        256 << 20
    )
    ledger_days: Annotated[
        Count,
        Setting(
            "Days after which entries of the ledger (what tenants have used) move from Redis to files beside "
            "the adapters. So long an answer that is resumed is known, and counted once."
        ),
    ] = 3
    ledger_spool_bytes: Annotated[
        Bytes,
        Setting(
            "Disk of each router for what Redis does not have of the ledger yet, 16 MiB at least; when it is full, "
            "completions are refused."
        ),
    ] = 1 << 30
    prices_path: Annotated[
        Path | None,
        Unit("FILE", "a file"),
        Setting("A file with prices, by which usage is shown with its amount (docs/usage.md).", unset="no amounts"),
    ] = None


# Settings: how long each part waits for another, and what it keeps for a retry.


class Timeouts(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts and recovery."""

    gang_wait_s: Annotated[
        Seconds,
        Setting(
            "How long a sequence waits while no gang is connected: long enough for Ray Serve to replace one.", "live"
        ),
    ] = 30.0
    cold_start_wait_s: Annotated[
        Seconds,
        Setting(
            "How long a sequence waits for a gang with --min-gangs 0; a gang may take as long to start.",
            "live",
        ),
    ] = 600.0
    router_drain_s: Annotated[
        Seconds,
        Setting("How long a router that stops continues its requests; then its clients' streams break.", "live"),
    ] = 600.0
