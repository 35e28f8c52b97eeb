"""The day of a tenant, as its people and the operators live it: by the command line and by OpenAI's client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import httpx
import openai
import pytest
from click.testing import CliRunner, Result
from openai.types.chat import ChatCompletion

from motet.cluster.commands.cli import main
from motet.cluster.launch.local_serve import free_ports
from motet.examples.demo.questions import held_out
from motet.examples.demo.styles import Style
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.running_motet import BASE, DEMO, KEYS, ONE_THREAD, RunningMotet, running_motet

pytestmark = pytest.mark.cluster

# In float32, where rounding decides no token, so that texts can be compared.
OPTIONS: Final = ("--dtype", "float32", *ONE_THREAD)
TENANT: Final = "initech"
OTHER: Final = "globex"  # has a key of the configuration
NAME: Final = "desk"
PLACE, QUESTION = next((i, q) for i, (q, _) in enumerate(held_out("base")) if "capital" in q)
WORKERS: Final = 4  # of a batch of requests
NUM_TRIES: Final = 1_000  # more requests than any trial here needs


def answer_of(style: Style) -> str:
    return held_out(style)[PLACE][1]


@dataclass(frozen=True)
class Answer:
    id: str
    text: str
    version: str | None


class Client:
    """OpenAI's client with one key, which adds up the usage that it got."""

    def __init__(self, motet: RunningMotet, key: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{motet.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)
        self.used: Counter[str] = Counter()

    def ask(self, model: str, user: str = "guest") -> Answer:
        raw = self.openai.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, user=user
        )
        made: ChatCompletion = raw.parse()
        assert made.usage is not None
        self._add(made.usage.prompt_tokens, made.usage.completion_tokens)
        return Answer(made.id, str(made.choices[0].message.content), raw.headers.get("x-motet-version"))

    def stream(self, model: str) -> str:
        text, chunks = "", 0
        for chunk in self.openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if chunk.usage is not None:
                chunks += 1
                self._add(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        assert chunks == 1
        return text

    def feedback(self, answer_id: str, thumb: str) -> bool:
        reported = self.openai.post(
            "/feedback", body={"id": answer_id, "thumb": thumb, "comment": f"{thumb}!"}, cast_to=httpx.Response
        )
        return bool(reported.json()["counted"])

    def models(self) -> set[str]:
        return {model.id for model in self.openai.models.list()}

    def _add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.used.update(requests=1, prompt_tokens=num_prompt_tokens, output_tokens=num_output_tokens)


class CommandLine:
    """`motet …` of the operators, or of the tenant with a key. In this process: each start takes half a second."""

    def __init__(self, motet: RunningMotet, key: str | None = None) -> None:
        self._where = ["--url", motet.url, *(["--data-dir", str(motet.data_dir)] if key is None else [])]
        self._environ = {"MOTET_API_KEY": key}  # which counts for more than a data folder

    def __call__(self, *arguments: str) -> str:
        done = self._run(*arguments)
        assert done.exit_code == 0, (arguments, done.stdout, done.stderr, done.exc_info)
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def refused(self, *arguments: str) -> str:
        """The message."""
        done = self._run(*arguments)
        assert done.exit_code == 1, (arguments, done.stdout, done.stderr, done.exc_info)
        return done.stderr

    def _run(self, *arguments: str) -> Result:
        return CliRunner(env=self._environ).invoke(main, [*arguments, *self._where])


@pytest.fixture(scope="module")
def motet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMotet]:
    with running_motet(tmp_path_factory.mktemp("day") / "data", free_ports(1)[0], *OPTIONS) as motet:
        yield motet


def test_a_day(motet: RunningMotet) -> None:
    operator = CommandLine(motet)
    neighbour, neighbours_line = Client(motet, KEYS[OTHER]), CommandLine(motet, KEYS[OTHER])

    # The operators make the tenant and its first keys.
    quota = ("--quota", "adapters=1", "--quota", "requests-per-minute=100000", "--quota", "concurrent-streams=50")
    assert operator.json("tenants", "create", TENANT, "--weight", "2", *quota)["quota"]["adapters"] == 1
    key = operator("keys", "create", TENANT, "--label", "builders").strip()
    app_key = operator("keys", "create", TENANT, "--scope", "infer", "--expires-in", "90d").strip()
    tenant, builders, app = CommandLine(motet, key), Client(motet, key), Client(motet, app_key)

    # It uploads, brings the adapter to a gang, which is no use of it, and the adapter answers at once.
    tenant("adapters", "upload", NAME, str(DEMO / "adapters" / "pirate"))
    assert "version 1" in tenant("preload", NAME)

    def where() -> tuple[str, str]:
        (version,) = tenant.json("residency", NAME)["data"]
        return version["tier"], version["state"]

    eventually(lambda: where() == ("device", "ready"), lambda: f"it is {where()}")
    assert app.ask(NAME).text == answer_of("pirate")
    assert app.stream(NAME) == answer_of("pirate")
    missing = CommandLine(motet, app_key).refused("adapters", "upload", NAME, str(DEMO / "adapters" / "shout"))
    assert "upload" in missing  # the scope that its key lacks
    assert "adapters" in tenant.refused("adapters", "upload", "second", str(DEMO / "adapters" / "shout"))

    # A second version is tried by its number; requests without a number keep the first.
    note = "in Spanish, as marketing wants it"
    tenant("adapters", "upload", NAME, str(DEMO / "adapters" / "spanish"), "--no-activate", "--note", note)
    tried = builders.ask(f"{NAME}@2")
    assert (tried.text, tried.version) == (answer_of("spanish"), f"{NAME}@2")
    assert app.ask(NAME).text == answer_of("pirate")
    second, first = tenant.json("versions", "list", NAME)
    assert (second["note"], second["is_current"], first["is_current"]) == (note, False, True)

    # It gets bad ratings: the canary goes by itself.
    tenant("canary", "start", NAME, "2", "--share", "0.5")
    on_trial(tenant, app, lambda answer: "down" if answer.text == answer_of("spanish") else "up")
    ended = tenant.json("canary", "show", NAME)
    assert ended["state"] == "rolled_back"
    assert "thumbs" in ended["reason"], ended
    assert ended["canary"]["thumbs_up"] == ended["stable"]["thumbs_down"] == 0
    assert set(ended["comments"]) == {"canary down: down!", "stable up: up!"}
    for number in range(20):
        eventually(lambda number=number: app.ask(NAME, f"later {number}").text == answer_of("pirate"))  # type: ignore[misc]

    # Another version cannot even be loaded: its canary goes, too, and says why.
    tenant("adapters", "upload", NAME, str(DEMO / "adapters" / "json"), "--no-activate")
    spoil(motet, tenant.json("versions", "list", NAME)[0]["digest"])
    tenant("canary", "start", NAME, "3", "--share", "0.5")
    on_trial(tenant, app, lambda _: None)
    ended = tenant.json("canary", "show", NAME)
    assert (ended["state"], ended["version"]) == ("rolled_back", 3)
    assert "could not be loaded" in ended["reason"], ended
    assert [one["state"] for one in tenant.json("versions", "list", NAME)] == ["failed", "ready", "ready"]

    # A good one is promoted, and the change can be taken back.
    tenant("adapters", "upload", NAME, str(DEMO / "adapters" / "shout"), "--no-activate")
    tenant("aliases", "set", NAME, "next", "4")
    assert builders.ask(f"{NAME}@next").text == answer_of("shout")
    tenant("canary", "start", NAME, "next", "--share", "0.5")
    texts = {app.ask(NAME, f"user {number}").text for number in range(20)}
    assert texts == {answer_of("shout"), answer_of("pirate")}
    tenant("versions", "promote", NAME)
    assert {app.ask(NAME, f"user {number}").text for number in range(20)} == {answer_of("shout")}
    assert tenant.json("canary", "show", NAME)["state"] == "promoted"
    tenant("versions", "rollback", NAME)
    assert app.ask(NAME).text == answer_of("pirate")
    assert app.ask(BASE).text == answer_of("base")

    # A guest gets a key with a quota of its own.
    guest = Client(motet, operator("keys", "create", TENANT, "--quota", "requests-per-minute=1").strip())
    refused = over_quota(guest)
    assert (refused.status_code, refused.code) == (429, "rate_limit_exceeded")
    headers = refused.response.headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    assert 0 < int(headers["retry-after"]) <= 60
    assert {"retry-after-ms", "x-ratelimit-reset-requests", "x-ratelimit-remaining-streams"} <= set(headers)
    limits = tenant.json("limits")["tenant"]
    assert (limits["requests_per_minute"]["limit"], limits["adapters"]["remaining"]) == (100_000, 0)
    assert "answers at once" in tenant("limits")

    # What it has used is what its clients received, by key and all together.
    clients = (builders, app, guest)
    expected = sum((client.used for client in clients), Counter[str]())
    eventually(lambda: used(tenant) == expected, lambda: f"{used(tenant)} and not {expected}")
    by_key = tenant.json("usage", "--by", "key")["data"]
    assert sorted(row["requests"] for row in by_key) == sorted(client.used["requests"] for client in clients)
    by_adapter = tenant.json("usage", "--by", "adapter")["data"]
    assert {(row["adapter"], row["version"]) for row in by_adapter} == {(BASE, 0), *((NAME, n) for n in (1, 2, 4))}
    of_all_tenants = CommandLine(motet, motet.operator_key()).json("usage", "--all", "--by", "tenant")["data"]
    (of_all,) = [row for row in of_all_tenants if row["tenant"] == TENANT]
    assert of_all["output_tokens"] == expected["output_tokens"]
    assert tenant("usage", "--csv").count("\n") >= 2

    # Another tenant sees nothing of all that.
    assert neighbour.models() == {BASE}
    for model in (NAME, f"{NAME}@1", f"{NAME}@next"):
        with pytest.raises(openai.NotFoundError):
            neighbour.ask(model)
    assert not neighbour.feedback(tried.id, "down")
    for requested in (
        ("adapters", "show"),
        ("versions", "list"),
        ("canary", "show"),
        ("aliases", "list"),
        ("residency",),
    ):
        assert same_as_unknown(neighbours_line, *requested)
    assert used(neighbours_line) == Counter()
    assert TENANT not in str(neighbours_line.json("limits"))

    # Suspended, resumed, deleted.
    operator("tenants", "suspend", TENANT)
    with pytest.raises(openai.PermissionDeniedError) as suspended:
        app.ask(NAME)
    assert suspended.value.code == "tenant_suspended"
    assert "suspended" in tenant.refused("versions", "list", NAME)
    operator("tenants", "resume", TENANT)
    assert app.ask(NAME).text == answer_of("pirate")
    assert "deleted" in operator("tenants", "delete", TENANT, "--yes")
    for client in clients:
        with pytest.raises(openai.AuthenticationError):
            client.ask(NAME)
    assert "key" in tenant.refused("usage")
    assert TENANT not in operator("tenants", "list")
    assert neighbour.ask(BASE).text == answer_of("base")

    # The audit log has the day, and no key.
    entries = operator.json("audit", "--tenant", TENANT)
    reported = Counter(entry["action"] for entry in entries)
    assert reported == Counter(
        {
            "tenant.create": 1,
            "key.create": 3,
            "adapter.upload": 4,
            "canary.start": 3,
            "canary.rolled_back": 2,
            "alias.set": 1,
            "adapter.promote": 1,
            "adapter.roll_back": 1,
            "tenant.suspend": 1,
            "tenant.resume": 1,
            "tenant.delete": 1,
            "tenant.deleted": 1,
        }
    )
    assert {entry["actor"]["kind"] for entry in entries if entry["action"] == "canary.rolled_back"} == {"judge"}
    assert not any(secret in json.dumps(entries) for secret in (key, app_key))


def on_trial(tenant: CommandLine, app: Client, thumb_of: Callable[[Answer], str | None]) -> None:
    """Requests of one user after another, some with feedback, until the canary has ended."""

    def ask_and_rate(user: int) -> None:
        try:
            answer = app.ask(NAME, f"user {user}")
        except openai.InternalServerError as error:
            if error.code != "adapter_failed":
                raise
            return
        thumb = thumb_of(answer)
        if thumb is not None:
            app.feedback(answer.id, thumb)

    with ThreadPoolExecutor(WORKERS) as pool:
        for start in range(0, NUM_TRIES, 5 * WORKERS):
            list(pool.map(ask_and_rate, range(start, start + 5 * WORKERS)))
            if tenant.json("canary", "show", NAME)["state"] != "running":
                return
    raise AssertionError(f"the canary goes on: {tenant.json('canary', 'show', NAME)}")


def spoil(motet: RunningMotet, digest: str) -> None:
    """Cuts off all files of an adapter that no gang has loaded yet."""
    paths = [path for path in (motet.data_dir / "store").rglob(f"{digest}/*") if path.is_file()]
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes()[:100])


def over_quota(client: Client) -> openai.RateLimitError:
    """The refusal of one request too many. On a slow machine some go through first, one a minute."""
    for number in count():
        try:
            client.ask(BASE)
        except openai.RateLimitError as error:
            assert number > 0
            return error
    raise AssertionError


def used(line: CommandLine) -> Counter[str]:
    """All that `motet usage` reports of a tenant, as its clients count it."""
    total = line.json("usage")["total"]
    assert total["cut_off"] == 0
    return +Counter({name: total[name] for name in ("requests", "prompt_tokens", "output_tokens")})


def same_as_unknown(line: CommandLine, *requested: str) -> bool:
    """Whether what another tenant has is refused as what does not exist."""
    return line.refused(*requested, NAME) == line.refused(*requested, "kesd").replace("kesd", NAME)
