"""The tokenizer of a model folder, read by transformers, and how the model makes embeddings."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from ...workers.wire.prompt_scores import Pooling

_log = logging.getLogger(__name__)


def load_tokenizer(folder: Path) -> Any:
    """A tokenizer of transformers with a `tokenizers` backend. Blocking; runs no code from the folder.

    Raises ValueError for a folder without one.
    """
    from transformers import AutoTokenizer  # takes a second: call this in a thread

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded (tokenizer.json is needed): {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder} has no tokenizer.json: only tokenizers with one are served")
    template = folder / "chat_template.json"  # older models that take pictures too have it there, for their processor
    if tokenizer.chat_template is None and template.is_file():
        try:
            tokenizer.chat_template = json.loads(template.read_text("utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{template} holds no chat template: {error!r}") from error
    return tokenizer


def import_transformers_without_torch() -> None:
    """Imports transformers so that it finds no torch: for processes that want its tokenizers only.

    Otherwise `AutoTokenizer` alone imports torch and model code: 2.4 s of CPU and 300 MB. Transformers looks for torch
    once, so that it offers no models in this process afterwards. Where torch or transformers is loaded already, there
    is nothing to save, and nothing changes.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    _log.info("importing transformers without torch, which its tokenizers do not need")
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes the import fail
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


def own_pad_id(folder: Path) -> int | None:
    """The token for padding in a model's config, as transformers reads it; None: it has none. Blocking."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:  # a folder of a tokenizer alone
        _log.info("%s names no token for padding: %s", folder, error)
        return None
    pad_id: int | None = getattr(config, "pad_token_id", None)
    return pad_id


# How a model was trained to make embeddings, as sentence-transformers writes it into the model's folder.

_MODULES: Final = "modules.json"
_TEXTS: Final = "sentence_bert_config.json"  # how texts are tokenized
_PROMPTS: Final = "config_sentence_transformers.json"  # what is put before them
_MODE: Final = "pooling_mode_"
_POOLINGS: Final[dict[str, Pooling]] = {
    "cls_token": "first",
    "cls": "first",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}


class OwnPooling(NamedTuple):
    pooling: Pooling | None = "last"  # None: it is one that motet does not compute
    is_normalised: bool = True  # embeddings have the length 1
    problem: str = ""  # why `pooling` is None


class _Module(msgspec.Struct, frozen=True):
    type: str  # a class of Python's
    path: Annotated[str, Meta(pattern=r"^[\w.-]*$")] = ""  # of its folder


def own_pooling(folder: Path) -> OwnPooling:
    """The pooling that a model's folder defines; by default the last token's states, normalised. Blocking."""
    try:
        listed = (folder / _MODULES).read_bytes()
    except FileNotFoundError:
        return OwnPooling()
    pooling: Pooling | None = None
    is_normalised = False
    try:
        for module in msgspec.json.decode(listed, type=list[_Module]):
            match module.type.rpartition(".")[2]:
                case "Transformer":
                    pass
                case "Pooling":
                    pooling = _pooling((folder / module.path / "config.json").read_bytes())
                case "Normalize":
                    is_normalised = True
                case other:
                    return OwnPooling(None, problem=f"the model's {_MODULES} has a module {other[:40]}, unknown here")
        if _fields(folder / _TEXTS).get("do_lower_case"):
            return OwnPooling(None, problem=f"the model's {_TEXTS} has texts in lower case (do_lower_case)")
        if prompt := _fields(folder / _PROMPTS).get("default_prompt_name"):
            message = f"the model's {_PROMPTS} puts the prompt {str(prompt)[:40]!r} before texts: send it with them"
            return OwnPooling(None, problem=message)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return OwnPooling(None, problem=f"the model's own pooling cannot be read ({error})")
    if pooling is None:
        return OwnPooling(None, problem=f"the model's {_MODULES} has no pooling")
    return OwnPooling(pooling, is_normalised)


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; empty if it does not exist."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def _pooling(config: bytes) -> Pooling:
    """Raises ValueError for one that motet does not compute."""
    fields = msgspec.json.decode(config, type=dict[str, Any])
    modes = [name.removeprefix(_MODE) for name, value in fields.items() if name.startswith(_MODE) and value is True]
    modes += [fields["pooling_mode"]] if isinstance(fields.get("pooling_mode"), str) else []
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"it is {' with '.join(modes) or 'none'}, and one of {', '.join(_POOLINGS)} is supported")
    return _POOLINGS[modes[0]]
