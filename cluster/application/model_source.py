"""Finds the folder of the model that a person names by a path or a hub id; downloads what a hub id names."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from ...workers.models.stored_tensor import shards

# Weights are safetensors only; a pickle is never fetched.
WANTED_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
UNWANTED_FILES = ["*/*.safetensors", "*/*.safetensors.index.json"]  # second copies of the weights in subfolders
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DONE_FILE = ".motet_download_complete"
PROGRESS_INTERVAL_S = 0.5

OnProgress = Callable[[str, int, int], None]


class ModelUnavailable(Exception):  # noqa: N818
    """The model cannot be found or downloaded; the message says why, and what would be accepted."""


def resolve_model(path_or_id: str, models_path: Path, on_progress: OnProgress) -> Path:
    """A complete model folder: config.json, safetensors and a tokenizer. Raises ModelUnavailable.

    A hub id is downloaded once into `models_path` and stays at that revision until its folder is deleted.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        folder = path.resolve()
        check_model_folder(folder)
        return folder
    if path.exists():
        raise ModelUnavailable(f"{path} is a file: a model folder in Hugging Face format or a hub id is needed")
    if not is_hub_id(path_or_id):
        raise ModelUnavailable(f"there is no folder {path}")
    folder = folder_of_hub_id(path_or_id, models_path)
    if not (folder / DONE_FILE).exists():
        _download(path_or_id, folder, on_progress)
    check_model_folder(folder)
    return folder


def is_hub_id(text: str) -> bool:
    """Whether it may be one; else it is a path.

    >>> [is_hub_id(text) for text in ("Qwen/Qwen3-8B", "gpt2", "./gpt2", "a/b/c")]
    [True, True, False, False]
    """
    return not text.startswith(("/", ".", "~")) and text.count("/") <= 1


def folder_of_hub_id(hub_id: str, models_path: Path) -> Path:
    """Where the model is, once it was downloaded.

    >>> str(folder_of_hub_id("Qwen/Qwen3-8B", Path("/data/models")))
    '/data/models/Qwen--Qwen3-8B'
    """
    return models_path / hub_id.replace("/", "--")


def check_model(folder: Path, hub_id: str | None, on_progress: OnProgress) -> None:
    """Returns once the model is complete in `folder` on this node, to which one with a hub id is downloaded.

    Nodes that share the folder download it once: the others wait. Raises ModelUnavailable.
    """
    if hub_id is None:
        check_model_folder(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        resolve_model(hub_id, folder.parent, on_progress)


def check_model_folder(folder: Path) -> None:
    """Raises ModelUnavailable, which names every missing file, unless the folder is complete."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    try:
        weights = [*shards(folder)] or [folder / "model.safetensors"]
    except ValueError as error:
        raise ModelUnavailable(str(error)) from error
    missing += [path.name for path in weights if not path.is_file()]
    if missing:
        raise ModelUnavailable(
            f"{folder} lacks {', '.join(missing)}: a model folder in Hugging Face format has config.json, "
            "*.safetensors and tokenizer.json"
        )


def _download(hub_id: str, folder: Path, on_progress: OnProgress) -> None:
    """Downloads the wanted files of the hub's current revision into `folder`; goes on where a call broke off."""
    disable_progress_bars()  # motet shows the progress itself, also without a terminal
    try:
        planned = huggingface_hub.snapshot_download(
            hub_id, local_dir=folder, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES, dry_run=True
        )
        if not planned:
            raise ModelUnavailable(f"{hub_id} has none of {', '.join(WANTED_FILES)}")
        num_bytes = sum(file.file_size or 0 for file in planned)
        with _watched_folder(folder, f"downloading {hub_id}", num_bytes, on_progress):
            huggingface_hub.snapshot_download(
                hub_id,
                revision=planned[0].commit_hash,
                local_dir=folder,
                allow_patterns=WANTED_FILES,
                ignore_patterns=UNWANTED_FILES,
            )
    except (OSError, HFValidationError) as error:
        raise ModelUnavailable(f"there is no folder {hub_id!r} here, and as a hub id {_reason(error)}") from error
    short = [file.filename for file in planned if not _has_size(folder / file.filename, file.file_size)]
    if short:
        raise ModelUnavailable(f"the download of {hub_id} is incomplete ({', '.join(short)}): run the command again")
    (folder / DONE_FILE).write_text(f"{hub_id} {planned[0].commit_hash}\n")


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, GatedRepoError):
        return "it is gated: accept its terms on the hub and log in with `hf auth login`"
    if isinstance(cause, RepositoryNotFoundError):
        return "the hub does not know it (or it is private: log in with `hf auth login`)"
    if isinstance(cause, HFValidationError):
        return f"it is not valid: {cause}"
    return f"it could not be downloaded, is there a network? ({cause})"


def _has_size(path: Path, num_bytes: int | None) -> bool:
    return path.is_file() and (num_bytes is None or path.stat().st_size == num_bytes)


@contextmanager
def _watched_folder(folder: Path, stage: str, total_bytes: int, on_progress: OnProgress) -> Iterator[None]:
    """Reports the bytes that arrive in `folder`, from a thread of its own, and the total at a clean end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            on_progress(stage, min(_num_bytes_under(folder), total_bytes), total_bytes)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    on_progress(stage, total_bytes, total_bytes)


def _num_bytes_under(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # a partial file that was renamed meanwhile
    return sizes
