"""The process that renders adapters' chat templates for a router: `python -m motet.router.text.template_process`.

A template is a program of a tenant's: it may loop, and may make texts of any size. So each is rendered in a process of
its own, forked from this one, which has imported what it needs. It has little time and memory, opens no file and no
connection, and has the sandbox of transformers around it, as a base's template has.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Final

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError

from ...adapters.processes.child_processes import (
    NOT_LAST,
    bound_cpu,
    bound_memory,
    read_frames,
    write_frames,
    yield_to_others,
)
from .chat_renderer import TemplateForms, template_forms
from .control_tokens import TEMPLATE_ERRORS, Apply, RenderedChats, rendered_chats

NICENESS: Final = 5  # it yields to all other work
CPU_S: Final = 1.0  # for one chat; some milliseconds are usual
MOST_BYTES: Final = 768 << 20  # of memory, 150 MiB of which are this process's
# Of what a template makes of a chat: that of a small one, and some times what the chat itself has, all JSON included.
MAX_SMALL_CHARS: Final = 1 << 16
MAX_GROWTH: Final = 4
_MAX_PROBLEM_CHARS: Final = 300


class _TextTooLong(Exception):  # noqa: N818
    """More than `args[0]` characters."""


class Rendered(msgspec.Struct, frozen=True):
    """What has come of a question: one of these. `text` is JSON, since marks of hidden characters are no UTF-8."""

    text: str = ""
    refusal: str = ""  # by the template, of these messages
    problem: str = ""  # with the template


class Probed(msgspec.Struct, frozen=True):
    """What is known of a template that has been compiled and tried."""

    forms: TemplateForms
    chats: RenderedChats


def _tokenizer() -> Any:
    """One without tokens, of which only the rendering of chats is used. No torch is imported for it."""
    from tokenizers import Tokenizer, models

    from .model_tokenizer import import_transformers_without_torch

    import_transformers_without_torch()
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({}, unk_token="")))
    warm_up = "{{ strftime_now('%c') }}{{ messages | tojson }}{{ raise_exception('') }}"
    with suppress(TemplateError):  # imports, and reads the time zone, while files are in reach
        apply_of(tokenizer, warm_up, {})([{"role": "user", "content": "hello"}])
    return tokenizer


def apply_of(
    tokenizer: Any, template: str, special_tokens: Mapping[str, str], max_chars: int = MAX_SMALL_CHARS
) -> Apply:
    """What renders chats by this template. `special_tokens`: of the base, by the names that templates know."""

    def apply(messages: Any, **options: Any) -> str:
        options = {**special_tokens, **options}
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **options))
        except (MemoryError, *TEMPLATE_ERRORS):
            raise
        except Exception as error:  # whatever the template has done, such as a division by zero
            raise TemplateError(_words(error)) from error
        if len(text) > max_chars:
            raise _TextTooLong(max_chars)
        return text

    return apply


def _rendered(apply: Apply, question: Mapping[str, Any]) -> Rendered:
    try:
        text = json.dumps(apply(question["messages"], **question["options"]))
    except TEMPLATE_ERRORS as error:
        return Rendered(refusal=_words(error))
    return Rendered(text)


def _probed(apply: Apply, template: str) -> Rendered:
    refusal = ""
    try:
        apply([{"role": "user", "content": "hello"}])
    except TemplateSyntaxError as error:
        return Rendered(problem=f"it cannot be compiled: {_words(error)} (line {error.lineno})")
    except TEMPLATE_ERRORS as error:
        refusal = _words(error)
    chats = rendered_chats(apply)
    if refusal and not any(chats):
        return Rendered(problem=f"it renders no chat: {refusal}")
    return Rendered(json.dumps(msgspec.to_builtins(Probed(template_forms(template, apply), chats))))


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_PROBLEM_CHARS]


def _answer(work: Callable[[], Rendered]) -> bytes:
    """What `work` returns in a process that it may end."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            for pipe in (sys.stdin.fileno(), sys.stdout.fileno(), source):
                os.close(pipe)
            bound_cpu(CPU_S)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            try:
                rendered = work()
            except MemoryError:
                rendered = Rendered(problem="it takes too much memory")
            except _TextTooLong as error:
                problem = f"it makes more than {error} characters of a chat that has less than a quarter of them"
                rendered = Rendered(problem=problem)
            data = memoryview(msgspec.msgpack.encode(rendered))
            while data:
                data = data[os.write(sink, data) :]
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    try:
        msgspec.msgpack.decode(answer, type=Rendered)
    except msgspec.DecodeError:
        return msgspec.msgpack.encode(Rendered(problem=f"it takes more than {CPU_S:g} s, or too much memory"))
    return answer


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    yield_to_others(NICENESS)
    bound_memory(MOST_BYTES)
    tokenizer = _tokenizer()
    while frames := read_frames(source):
        template = frames[0].decode()
        question = json.loads(frames[1])
        max_chars = MAX_SMALL_CHARS + (MAX_GROWTH * len(frames[1]) if "messages" in question else 0)
        apply = apply_of(tokenizer, template, question["special_tokens"], max_chars)

        def work(apply: Apply = apply, template: str = template, question: Mapping[str, Any] = question) -> Rendered:
            return _rendered(apply, question) if "messages" in question else _probed(apply, template)

        write_frames(sink, [NOT_LAST, _answer(work)])


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
