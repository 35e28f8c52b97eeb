"""The form of an adapter's upload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request

from ...adapters.format.own_tokenizer import NO_TOKENIZER, OwnTokenizer
from ...adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from ...adapters.names import PART
from ...adapters.registry.versions.name_state import MAX_NOTE_CHARS
from ..bodies.body_limits import ArrivalPace
from ..text.answer_formats import FORMATS
from .form_reader import FormReader, bad_form, too_large
from .upload_spool import UploadRoom

NAME_FIELD: Final = "name"
NOTE_FIELD: Final = "note"
ACTIVATE_FIELD: Final = "activate"
PRIVATE_FIELD: Final = "private"
TOKENIZER_FIELD: Final = "tokenizer"  # a JSON `OwnTokenizer`
FIELDS: Final = (NAME_FIELD, CONFIG_FILE, TENSORS_FILE)
TEMPLATE_FIELD: Final = "response_template"
MAX_NAME_BYTES: Final = 1024
MAX_NOTE_BYTES: Final = 4 * MAX_NOTE_CHARS
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_TOKENIZER_BYTES: Final = 1 << 18  # some ten thousand added tokens, compared in milliseconds


_File = {"contentMediaType": "application/octet-stream"}


class AdapterForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an upload, as PEFT saves an adapter."""

    name: Annotated[
        str,
        Meta(
            pattern=f"^(~[^/]*/)?({PART}/)?{PART}$",
            description="What requests call it in `model`; not the base's name. `~user/name`: private to that user.",
        ),
    ]
    config: Annotated[
        str, Meta(description=f"The file as PEFT writes it, at most {MAX_CONFIG_BYTES} bytes.", extra_json_schema=_File)
    ] = msgspec.field(name=CONFIG_FILE)
    tensors: Annotated[str, Meta(description="The file as PEFT writes it.", extra_json_schema=_File)] = msgspec.field(
        name=TENSORS_FILE
    )


@dataclass(frozen=True)
class UploadForm:
    name: str
    config: bytes  # adapter_config.json
    note: str = ""  # of the uploader, on this version
    activate: bool = True  # the name points to it from now on
    must_be_new: bool = False  # the name
    is_private: bool = False  # it belongs to the uploader, not to the whole tenant
    tokenizer: OwnTokenizer = NO_TOKENIZER  # that it was trained with, and that is not served
    response_template: str = ""  # name of the form in which it writes; empty: in the base's


def check_form(request: Request, max_tensors_bytes: int) -> None:
    """Raises 400 for another kind of body, 413 for a declared length over the limit."""
    _reader(max_tensors_bytes).boundary(request)


async def receive_upload(
    request: Request, tensors_path: Path, max_tensors_bytes: int, idle_s: float, pace: ArrivalPace, room: UploadRoom
) -> UploadForm:
    """The small fields of the form; the tensors are written to `tensors_path`. Raises as `FormReader.receive`."""
    reader = _reader(max_tensors_bytes)
    await reader.receive(request, tensors_path, idle_s, pace, room)
    return UploadForm(
        reader.text(NAME_FIELD, "The adapter's name"),
        reader.bytes_of(CONFIG_FILE),
        note=_note(reader),
        activate=reader.flag(ACTIVATE_FIELD, default=True),
        is_private=reader.flag(PRIVATE_FIELD, default=False),
        tokenizer=_tokenizer(reader),
        response_template=_template(reader),
    )


def _reader(max_tensors_bytes: int) -> FormReader:
    limits = {
        NAME_FIELD: MAX_NAME_BYTES,
        CONFIG_FILE: MAX_CONFIG_BYTES,
        TENSORS_FILE: max_tensors_bytes,
        NOTE_FIELD: MAX_NOTE_BYTES,
        ACTIVATE_FIELD: len("false"),
        PRIVATE_FIELD: len("false"),
        TOKENIZER_FIELD: MAX_TOKENIZER_BYTES,
        TEMPLATE_FIELD: max(map(len, FORMATS)),
    }
    return FormReader(limits, TENSORS_FILE, FIELDS)


def _note(reader: FormReader) -> str:
    note = reader.text(NOTE_FIELD, "The note")
    if len(note) > MAX_NOTE_CHARS:
        raise too_large(NOTE_FIELD, MAX_NOTE_BYTES)
    return note


def _template(reader: FormReader) -> str:
    name = reader.bytes_of(TEMPLATE_FIELD).decode("utf-8", "replace")
    if name and name not in FORMATS:
        raise bad_form(f"The part '{TEMPLATE_FIELD}' is one of {', '.join(FORMATS)}.", TEMPLATE_FIELD)
    return name


def _tokenizer(reader: FormReader) -> OwnTokenizer:
    value = reader.bytes_of(TOKENIZER_FIELD)
    try:
        return msgspec.json.decode(value, type=OwnTokenizer) if value else NO_TOKENIZER
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_form(f"The part '{TOKENIZER_FIELD}' is malformed: {error}.", TOKENIZER_FIELD) from error
