"""Chats of adapters that have chat templates of their own, rendered beside the router."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from jinja2 import TemplateError

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import AdapterCorrupt, AdapterInvalid, StoreUnavailable
from ...adapters.processes.child_processes import ChildProcesses
from ...adapters.tenant_places import TenantPlaces
from ..http.errors import ApiError, unavailable
from .chat_renderer import ChatTemplateError
from .template_process import Probed, Rendered
from .text import TextService

NUM_PROCESSES: Final = 2  # of which a tenant has one
DEADLINE_S: Final = 30.0  # for one chat, on a machine that is busy: its CPU is bounded more closely
NUM_THREADS: Final = 8  # of chats that are rendered, or wait for a process
MOST_THREADS: Final = 2  # of one tenant
MAX_KNOWN: Final = 256  # templates, by tenant
_MODULE: Final = "motet.router.text.template_process"
_log = logging.getLogger(__name__)


class AdapterTemplates:
    """Belongs to one event loop. Its processes start at first use."""

    def __init__(self, base: TextService, read: Callable[[AdapterVersion], Awaitable[str]]) -> None:
        """`read`: the source of a version's chat template, from the store."""
        self._base, self._read = base, read
        self._processes = ChildProcesses(_MODULE, NUM_PROCESSES, DEADLINE_S)
        self._places = TenantPlaces(NUM_PROCESSES)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="template")
        self._turns = TenantPlaces(NUM_THREADS, MOST_THREADS)
        self._texts: OrderedDict[tuple[str, str], TextService] = OrderedDict()  # the last used one last

    async def check(self, tenant: str, template: str) -> None:
        """Raises AdapterInvalid for a template that cannot be compiled, or that takes too much to be tried."""
        try:
            await self._probe(tenant, template)
        except ChatTemplateError as error:
            raise AdapterInvalid(f"{error}: send another, or none for the base's") from error

    async def text(self, tenant: str, version: AdapterVersion | None) -> TextService:
        """What renders the version's chats. None: the base's.

        Raises a 400 for a template that takes too much to be tried, 500 for one that is damaged, and 503.
        """
        if version is None or not version.chat_template:
            return self._base.of(tenant)
        key = tenant, version.chat_template
        text = self._texts.get(key)
        if text is None:
            try:
                template = await self._read(version)
                probed = await self._probe(tenant, template)
            except StoreUnavailable as error:
                raise unavailable(str(error), "store_unavailable") from error
            except AdapterCorrupt as error:
                raise ApiError(500, str(error), code="adapter_failed") from error
            except ChatTemplateError as error:
                raise ApiError(400, f"{error}.", param="messages", code="invalid_messages") from error
            apply = _Apply(self, asyncio.get_running_loop(), tenant, template)
            of_template = self._base.with_template
            arguments = (template, probed.forms, probed.chats, apply, self._threads, self._turns)
            text = self._texts[key] = (await asyncio.to_thread(of_template, *arguments)).of(tenant)
        self._texts.move_to_end(key)
        if len(self._texts) > MAX_KNOWN:
            self._texts.popitem(last=False)
        return text

    async def _probe(self, tenant: str, template: str) -> Probed:
        return msgspec.json.decode(await self.rendered(tenant, template, self.question({})), type=Probed)

    def question(self, chat: Mapping[str, Any]) -> bytes:
        return json.dumps({**chat, "special_tokens": self._base.special_tokens}).encode()

    async def rendered(self, tenant: str, template: str, question: bytes) -> str:
        """JSON of what has come of it. Raises ChatTemplateError, TemplateError for messages that it refuses, 503."""
        try:
            async with self._places.of(tenant), self._processes.process() as process:
                answer = await process.ask(
                    [template.encode(), question], lambda frames: msgspec.msgpack.decode(frames[0], type=Rendered)
                )
        except (OSError, EOFError, TimeoutError) as error:
            _log.warning("a chat could not be rendered by its adapter's template: %r", error)
            raise unavailable("The adapter's chat template cannot be rendered now.", "overloaded") from error
        if answer.problem:
            raise ChatTemplateError(f"the adapter's chat template cannot be used: {answer.problem}")
        if answer.refusal:
            raise TemplateError(answer.refusal)
        return answer.text


class _Apply:
    """Renders by one template, for a thread that may wait."""

    def __init__(
        self, templates: AdapterTemplates, loop: asyncio.AbstractEventLoop, tenant: str, template: str
    ) -> None:
        self._templates, self._loop, self._tenant, self._template = templates, loop, tenant, template

    def __call__(self, messages: Any, **options: Any) -> str:
        question = self._templates.question({"messages": messages, "options": options})
        work = self._templates.rendered(self._tenant, self._template, question)
        return str(json.loads(asyncio.run_coroutine_threadsafe(work, self._loop).result()))
