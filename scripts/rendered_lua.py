"""Writes each Lua script of the product into the folder that is the argument, as Redis gets it."""

from __future__ import annotations

import sys
from pathlib import Path

from motet.adapters.registry.lua_script import LuaScript

ROOT = Path(__file__).resolve().parent.parent

scripts = {path: LuaScript(path) for part in ("adapters", "router") for path in (ROOT / part).rglob("*.lua")}
included = {path for script in scripts.values() for path in script.included}  # checked where they are
for path in scripts.keys() - included:
    target = Path(sys.argv[1]) / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(scripts[path].source)
