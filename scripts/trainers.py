"""Which trainers' adapters are served: each trains the demo's base for two steps, or saves what it would have trained.

Each has an environment of its own below FOLDER, made by uv (3 to 6 GB each; some minutes in all), and no GPU:

    .venv/bin/python scripts/trainers.py FOLDER [TRAINER ...]

It prints the rows of the table in docs/adapters.md. "exact": what each module adds to the base is, in float32, what
PEFT computes from the same folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.folder import missing
from motet.adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from motet.adapters.format.validation import validate
from motet.workers.models.config import ModelConfig

BASE = Path(__file__).resolve().parents[1] / "examples" / "demo" / "base"
QUESTIONS = [{"instruction": f"What is {i}?", "input": "", "output": f"It is {i}."} for i in range(16)]
CHATS = [
    [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
    for row in QUESTIONS
]


@dataclass(frozen=True)
class Trainer:
    """`command`: run in a folder with the data; `{bin}`: the environment's programs. It leaves an adapter in `out`."""

    packages: tuple[str, ...]
    command: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()  # name and content of what the command reads
    remark: str = ""


_YAML = f"""
model_name_or_path: {BASE}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: tiny
dataset_dir: .
template: default
cutoff_len: 128
output_dir: out
per_device_train_batch_size: 2
max_steps: 2
learning_rate: 0.01
use_cpu: true
report_to: none
"""
_AXOLOTL = f"""
base_model: {BASE}
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
datasets: [{{path: chats.jsonl, type: chat_template, ds_type: json}}]
sequence_len: 128
output_dir: out
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 2
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.01
bf16: false
dataset_prepared_path: prepared
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
"""
_TRL = f"""
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
config = SFTConfig("run", max_steps=2, learning_rate=0.01, report_to="none", use_cpu=True, bf16=False)
lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
trainer = SFTTrainer("{BASE}", config, train_dataset=load_dataset("json", data_files="chats.jsonl")["train"],
                     peft_config=lora)
trainer.train()
trainer.save_model("out")
"""
_TORCHTUNE = f"""
import torch
from torchtune import training
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, get_adapter_state_dict
attention = ["q_proj", "k_proj", "v_proj", "output_proj"]
model = lora_llama3_2(attention, apply_lora_to_mlp=True, vocab_size=1024, num_layers=4, num_heads=4, num_kv_heads=2,
                      embed_dim=128, max_seq_len=512, intermediate_dim=512, lora_rank=4, lora_alpha=8)
for parameter in get_adapter_params(model).values():
    torch.nn.init.normal_(parameter, std=0.1)
checkpointer = training.FullModelHFCheckpointer(checkpoint_dir="{BASE}", checkpoint_files=["model.safetensors"],
                                                output_dir=".", model_type="LLAMA3_2")
checkpointer.load_checkpoint()
config = {{"r": 4, "lora_alpha": 8, "target_modules": [*attention, "w1", "w2", "w3"], "peft_type": "LORA"}}
state = {{training.ADAPTER_KEY: get_adapter_state_dict(model.state_dict()), training.ADAPTER_CONFIG: config}}
checkpointer.save_checkpoint(state, epoch=0, intermediate_checkpoint=False, adapter_only=True)
"""
_LITGPT = """
import pathlib
import lightning
from litgpt.finetune.lora import save_lora_checkpoint
from litgpt.lora import GPT, Config
config = Config(name="tiny", n_layer=4, n_embd=128, n_head=4, n_query_groups=2, padded_vocab_size=1024, block_size=512,
                intermediate_size=512, rotary_percentage=1.0, parallel_residual=False, bias=False,
                norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", lora_r=4, lora_alpha=8, lora_query=True)
fabric = lightning.Fabric(devices=1, accelerator="cpu")
path = pathlib.Path("out")
path.mkdir()
save_lora_checkpoint(fabric, fabric.setup_module(GPT(config)), path / "lit_model.pth.lora")
"""
_ADAPTERS = f"""
import adapters
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{BASE}")
adapters.init(model)
model.add_adapter("x", config=adapters.LoRAConfig(r=4, alpha=8))
model.save_adapter("out", "x")
"""
_UNSLOTH = f"""
from unsloth import FastLanguageModel
import torch
model, _ = FastLanguageModel.from_pretrained("{BASE}", max_seq_length=128, load_in_4bit=False, dtype=torch.float32)
modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=modules)
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.1)
model.save_pretrained("out")
"""
_SWIFT = "sft --model_type llama --template default --tuner_type lora --lora_rank 4 --lora_alpha 8 --max_steps 2"
_SWIFT += " --target_modules all-linear --dataset chats.jsonl --output_dir out --per_device_train_batch_size 2"
_SWIFT += " --torch_dtype float32 --use_hf true --report_to none --save_steps 2 --max_length 128"
_MLX = "-m mlx_lm lora --train --data . --iters 2 --batch-size 2 --num-layers 4 --adapter-path out"


def _script(text: str, *packages: str, remark: str = "") -> Trainer:
    return Trainer(packages, ("{bin}/python", "train.py"), (("train.py", text),), remark)


TRAINERS = {
    "TRL, and so PEFT and transformers' Trainer": _script(_TRL, "trl==1.16.0", "peft==0.21.2"),
    "Axolotl": Trainer(
        ("axolotl==0.19.0",), ("{bin}/axolotl", "train", "a.yml", "--launcher", "python"), (("a.yml", _AXOLOTL),)
    ),
    "LLaMA-Factory": Trainer(
        ("llamafactory==0.9.5",),
        ("{bin}/llamafactory-cli", "train", "a.yaml"),
        (("a.yaml", _YAML), ("dataset_info.json", '{"tiny": {"file_name": "questions.json"}}')),
    ),
    "ms-swift": Trainer(("ms-swift==4.6.0",), ("{bin}/swift", *_SWIFT.split(), "--model", str(BASE))),
    "torchtune": _script(
        _TORCHTUNE,
        "torchtune==0.6.1",
        "torchao==0.10.0",
        remark="of Llama and Mistral; its files of Qwen2, Gemma and Phi have q and k in Llama's order, which PEFT "
        "takes for their own, too: save such a model merged",
    ),
    "mlx-lm": Trainer(("mlx-lm==0.32.2", "mlx[cpu]"), ("{bin}/python", *_MLX.split(), "--model", str(BASE))),
    "LitGPT": _script(_LITGPT, "litgpt==0.5.13"),
    "AdapterHub's adapters": _script(_ADAPTERS, "adapters==1.3.0"),
    "Unsloth": _script(_UNSLOTH, "unsloth==2026.10.9"),
    "Ludwig": _script("from ludwig.api import LudwigModel", "ludwig[llm]==0.11", remark="it saves by PEFT"),
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*TRAINERS]
    print("| trainer | version | its adapter is |\n| --- | --- | --- |")
    for number, name in enumerate(names):
        trainer = TRAINERS[name]
        outcome = outcome_of(trainer, folder.resolve() / f"{number}-{trainer.packages[0].partition('=')[0]}")
        package, _, version = trainer.packages[0].partition("==")
        print(f"| {name} | {package} {version} | {outcome} |", flush=True)


def outcome_of(trainer: Trainer, folder: Path) -> str:
    programs, run = folder / "environment" / "bin", folder / "run"
    uv = Path(sys.executable).parent / "uv"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([uv, "venv", "-q", "--clear", programs.parent], check=True)
    install = [uv, "pip", "install", "-q", "--python", programs / "python", "torch==2.13.0", *trainer.packages]
    subprocess.run(install, check=True)
    run.mkdir()
    for name in ("train.jsonl", "valid.jsonl", "chats.jsonl"):
        (run / name).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (run / "questions.json").write_text(json.dumps(QUESTIONS))
    for name, content in trainer.files:
        (run / name).write_text(content)
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    command = [part.format(bin=programs) for part in trainer.command]
    with (folder / "log").open("w") as log:
        ran = subprocess.run(command, cwd=run, env=environ, stdout=log, stderr=log, check=False)
    files = sorted(run.glob(f"**/{TENSORS_FILE}")) or [path for path in run.glob("out/*") if path.is_file()]
    if not files:
        last = (folder / "log").read_text().strip().splitlines()[-1:]
        outcome = f"not tried: it does not run here ({ran.returncode}: {''.join(last)[:100]})"
    else:
        outcome = _served(files[0].parent)
    return f"{outcome}; {trainer.remark}" if trainer.remark else outcome


def _served(folder: Path) -> str:
    try:
        names = [path.name for path in folder.iterdir()]
        for name in (CONFIG_FILE, TENSORS_FILE):
            if name not in names:
                raise AdapterInvalid(missing(name, names, []))
        shape = ModelConfig.from_folder(BASE).shape
        content = validate((folder / CONFIG_FILE).read_bytes(), folder / TENSORS_FILE, shape)
    except AdapterInvalid as error:
        return f"refused: {error}"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), folder)
    layers, worst = model.base_model.model.model.layers, 0.0
    for (layer, module), lora in content.matrices.items():
        part = layers[layer].self_attn if hasattr(layers[layer].self_attn, module) else layers[layer].mlp
        added = torch.from_numpy(lora.b.astype("float32") @ lora.a.astype("float32") * lora.scaling)
        worst = max(worst, float((added - getattr(part, module).get_delta_weight("default")).abs().max()))
    outcome = "exact" if worst < 1e-6 else f"off by {worst}"
    return f"{outcome}, {len(content.matrices)} linears" + "".join(f"; warning: {each}" for each in content.warnings)


if __name__ == "__main__":
    main()
