"""Lua scripts in files: their names, what they include, and that Redis and luacheck take all of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.lua_script import LuaScript
from motet.tests.rigs.imports import ROOT
from motet.tests.test_layout import our_files

SCRIPTS = [path for path in our_files(ROOT) if path.suffix == ".lua"]


def written(folder: Path, **files: str) -> LuaScript:
    """The script `main` of files that are called so."""
    for name, text in files.items():
        (folder / f"{name}.lua").write_text(text)
    return LuaScript(folder / "main.lua")


async def test_names_are_bound(tmp_path: Path, redis_client: Redis) -> None:
    script = written(
        tmp_path,
        main="-- KEYS: one, two\n-- ARGV: first, second, rest[]\nreturn {one, two, first, second, unpack(rest)}",
    )
    call = script.bind(redis_client, {"one": "1", "two": "2", "other": "3"})
    assert await call(first="a", second=None, rest=[True, 7, "z"]) == ["1", "2", "a", "", "1", "7", "z"]
    assert await call(first=0.5, second=False, rest=[]) == ["1", "2", "0.5", "0"]


async def test_a_list_may_be_long(tmp_path: Path, redis_client: Redis) -> None:
    call = written(tmp_path, main="-- ARGV: first, rest[]\nreturn {#rest, rest[#rest], first}").bind(redis_client)
    assert await call(first=1, rest=range(20_000)) == [20_000, "19999", "1"]


async def test_a_pipeline_gets_the_call(tmp_path: Path, redis_client: Redis) -> None:
    call = written(tmp_path, main="-- ARGV: text\nreturn text").bind(redis_client)
    async with redis_client.pipeline(transaction=False) as pipeline:
        for text in ("a", "b"):
            await call(on=pipeline, text=text)
        assert await pipeline.execute() == ["a", "b"]


@pytest.mark.parametrize(
    "values", [{}, {"key": "k"}, {"key": "k", "text": "t", "more": "m"}, {"key": "k", "txet": "t"}], ids=str
)
def test_a_wrong_name_is_an_error(tmp_path: Path, values: dict[str, str]) -> None:
    script = written(tmp_path, main="-- KEYS: key\n-- ARGV: text\nreturn key .. text")
    assert script.parameters(key="k", text="t") == (["k"], ["t"])
    with pytest.raises(TypeError, match=r"main\.lua: missing"):
        script.parameters(**values)


async def test_included_files_bring_their_names(tmp_path: Path, redis_client: Redis) -> None:
    script = written(
        tmp_path,
        main="-- include: inner.lua, outer.lua\n-- KEYS: mine\n-- ARGV: own\nreturn outer(own) .. inner(mine)",
        outer="-- include: inner.lua\n-- ARGV: mark\nlocal function outer(text) return inner(text) .. mark end",
        inner="-- KEYS: place\nlocal function inner(text) return text .. place end",
    )
    assert (script.keys, script.args) == (("mine", "place"), ("mark", "own"))
    assert await script.bind(redis_client)(mine="m", place="p", own="o", mark="!") == "op!mp"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"main": "-- ARGV: rest[], other\nreturn 1"}, "only the last"),
        ({"main": "-- include: part.lua\nreturn 1", "part": "-- ARGV: rest[]"}, "only the last"),
        ({"main": "-- KEYS: Key of it\nreturn 1"}, "not the name of a key"),
    ],
)
def test_a_wrong_declaration_is_an_error(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        written(tmp_path, **files)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
async def test_redis_compiles_each_script(path: Path, redis_client: Redis) -> None:
    script = LuaScript(path)
    assert await redis_client.script_load(script.source) == script.sha
