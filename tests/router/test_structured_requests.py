"""Requests for structured output, at a router with a scripted engine: what its engine gets, and what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from motet.router.grammars import grammar_check
from motet.router.grammars.check_process import Verdict
from motet.router.grammars.grammar_check import MAX_TENANT_BYTES, MAX_WAITING, GrammarCheck, KnownGrammars
from motet.router.grammars.response_format import WantedGrammar
from motet.router.http.errors import ApiError
from motet.tests.rigs.grammar_matcher import accepts
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
GBNF = 'root ::= "a" root | "b"'
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
NAMED = {"name": "point", "description": "A point.", "strict": True, "schema": SCHEMA}
VOCAB_SIZE = 320
CHAIN = "\n".join(["start: r0", *(f'r{number}: r{number + 1} "x"' for number in range(5000)), 'r5000: "y"'])

# Fields -> a text that their grammar takes, and one that it does not.
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[]"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, '{"x":1}', "{}"),
    ({"response_format": TAGS}, 'hm <f>{"x":1}</f>', "hm <f>{}</f>"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"x":1}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"x":1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"x":1}', '{"x": 1}'),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, '{"x": 1}', '{"x":  1}'),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": "a|b"}}, "a", "c"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": GBNF}}, "aab", "a"),
    ({"structured_outputs": {"grammar": 'start: "a" <|end|>'}}, "", "a"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "hm", "hm <f>{}</f>"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, '{"x": 1}', '{"x":  1}'),
    ({"guided_regex": "a|b", "guided_decoding_backend": "xgrammar"}, "a", "c"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": GBNF}, "aab", "a"),
    ({"structural_tag": json.dumps(TAGS)}, "hm", "hm <f>{}</f>"),
    ({"json_schema": json.dumps(SCHEMA)}, '{"x":1}', "{}"),
    ({"regex": "a|b"}, "a", "c"),
    ({"ebnf": GBNF}, "aab", "a"),
]
PROPERTY = "response_format.json_schema.schema"
# Fields -> the field that the error names, and what it says.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "response_format says already"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "send one of them"),
    ({"guided_json": SCHEMA, "json_schema": "{}"}, "json_schema", "guided_json says already"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        "",
        "one of them",
    ),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "", "additionalProperties"),
    ({"structured_outputs": {"json": {}, "lenient": True}}, "structured_outputs", "unknown field `lenient`"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing required parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, PROPERTY, "Missing required"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": {"not": {}}}}}, PROPERTY, '"not"'),
    ({"guided_json": {"minimum": 10**30}}, "guided_json", "64 bits"),
    ({"guided_json": {"enum": ["x" * 200_000]}}, "guided_json", "at most"),
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": "a", "use_beam_search": True}, "regex", "beams"),
    ({"ebnf": CHAIN}, "ebnf", "nested too deeply"),
    ({"ebnf": "root ::= a"}, "ebnf", "'a'"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "too m"),  # any expressions, or on slow cores much time
    ({"guided_choice": [str(number) * 3 for number in range(9000)] * 2}, "guided_choice", "at most"),
]


@pytest.fixture
def rig(tmp_path: Path) -> RouterRig:
    return RouterRig(tmp_path / "spool", text_service())


async def post(client: Any, path: str, fields: dict[str, Any]) -> Any:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    return await client.post(path, json={"model": BASE, **prompt, **fields})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_field_gives_the_engine_its_grammar(rig: RouterRig, path: str) -> None:
    async with rig.client() as client:
        for fields, taken, not_taken in FORMS:
            response = await post(client, path, {**fields, "n": 2, "seed": 5, "logit_bias": {"3": 1}})
            assert response.status_code == 200, (fields, response.text)
            grammars = {request.sampling.grammar for request in rig.dispatcher.submitted[-2:]}
            assert len(grammars) == 1
            if "<|end|>" not in str(fields):  # whose id the rig's matcher lacks
                assert accepts(*grammars, taken), fields
                assert not accepts(*grammars, not_taken), fields
        assert f"<[{rig.ids('<|end|>')[0]}]>" in next(
            one.sampling.grammar for one in rig.dispatcher.submitted if one.sampling.grammar.endswith(">")
        )
        response = await post(client, path, {"response_format": {"type": "text"}})
        assert response.status_code == 200
        assert not rig.dispatcher.submitted[-1].sampling.grammar


async def test_what_cannot_be_served_is_refused_by_name(rig: RouterRig) -> None:
    async with rig.client() as client:
        for fields, param, reported in REFUSED:
            response = await post(client, "/v1/chat/completions", fields)
            error = response.json()["error"]
            assert response.status_code == 400, (fields, error)
            assert reported in error["message"], error
            assert not param or param in (error["param"], error["message"]), error
        assert not rig.dispatcher.submitted
        assert (await post(client, "/v1/completions", {"regex": "a"})).status_code == 200


async def test_a_tenants_grammars_wait_for_each_other_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check, goes_on, requested = GrammarCheck({}), asyncio.Event(), []

    async def ask(data: bytes, vocab_size: int) -> tuple[Verdict, float]:
        requested.append(data)
        await goes_on.wait()
        return Verdict(lark="start: /a/"), 0.0

    monkeypatch.setattr(check, "_run", ask)

    def lark(tenant: str, pattern: str) -> asyncio.Task[str]:
        return asyncio.create_task(check.lark(tenant, WantedGrammar("regex", "regex", pattern), VOCAB_SIZE))

    same = [lark("acme", "a"), lark("acme", "a")]
    more = [lark("acme", f"a{number}") for number in range(MAX_WAITING - 1)]
    await eventually_in_loop(lambda: len(requested) == 1)
    with pytest.raises(ApiError, match="wait to be compiled") as refused:
        await lark("acme", "b")
    assert refused.value.status_code == 429
    other = lark("zenith", "a")
    await eventually_in_loop(lambda: len(requested) == 2)
    goes_on.set()
    await asyncio.gather(other, *same, *more)
    assert len(requested) == MAX_WAITING + 1  # one for each grammar of each tenant
    check.cache.check_integrity()


async def test_a_tenant_rests_after_a_costly_grammar_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check, requested = GrammarCheck({}), list[bytes]()

    async def ask(data: bytes, vocab_size: int) -> tuple[Verdict, float]:
        requested.append(data)
        return Verdict(lark="start: /a/"), 1e6

    monkeypatch.setattr(check, "_run", ask)
    await check.lark("acme", WantedGrammar("regex", "regex", "a"), VOCAB_SIZE)
    rests = asyncio.create_task(check.lark("acme", WantedGrammar("regex", "regex", "b"), VOCAB_SIZE))
    for tenant in ("zenith", "other", "third"):
        await check.lark(tenant, WantedGrammar("regex", "regex", "b"), VOCAB_SIZE)
    assert await check.lark("acme", WantedGrammar("regex", "regex", "a"), VOCAB_SIZE)  # it is known
    assert not rests.done() and len(requested) == 4
    rests.cancel()


def test_known_grammars_are_bounded_by_tenant_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownGrammars()
    monkeypatch.setattr("motet.router.grammars.grammar_check.MAX_BYTES", 2 * MAX_TENANT_BYTES)
    large = Verdict(lark="x" * (MAX_TENANT_BYTES // 4))
    known.put("acme", b"first", Verdict(problem="p"))
    for number in range(10):
        known.get("acme", b"first")
        known.put("acme", b"%d" % number, large)
        known.check_integrity()
    assert known.get("acme", b"first") == Verdict(problem="p")  # it was used
    assert known.get("acme", b"0") is None
    assert known.get("zenith", b"9") is None
    for tenant in ("zenith", "other", "third"):
        known.put(tenant, b"a", large)
        known.put(tenant, b"b", large)
        known.check_integrity()
    assert known.get("acme", b"first") is None  # of all, it is the tenant that has not asked for longest


async def test_a_process_that_cannot_be_reached_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MODULE", "motet.tests.rigs.no_such_module")
    with pytest.raises(ApiError) as failed:
        await GrammarCheck({}).lark("acme", WantedGrammar("regex", "regex", "a"), VOCAB_SIZE)
    assert failed.value.status_code == 503


async def test_requests_that_are_given_up_cost_others_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck({})
    started: list[subprocess.Popen[bytes]] = []
    start = check._processes._started

    def noted() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(check._processes, "_started", noted)
    choices = [f"a choice of {number}" for number in range(5000)]
    for number in range(4):
        wanted = WantedGrammar("choice", "choice", [*choices, str(number)])
        request = asyncio.create_task(check.lark("acme", wanted, VOCAB_SIZE))
        await eventually_in_loop(lambda: check._places.num_here("acme"))
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await check.lark("zenith", WantedGrammar("regex", "regex", f"a{number}"), VOCAB_SIZE)
        assert await check.lark("acme", wanted, VOCAB_SIZE)
    assert {*check._processes._idle} == {*started}  # none was ended
    assert not check._trials
    check._places.check_integrity()
