"""Writes each Lua script of the product, as it is sent to Redis, into the folder given as argument."""

from __future__ import annotations

import sys
from pathlib import Path

from motet.adapters.registry.lua_script import LuaScript

ROOT = Path(__file__).resolve().parent.parent

scripts = {path: LuaScript(path) for part in ("adapters", "router") for path in (ROOT / part).rglob("*.lua")}
included = {path for script in scripts.values() for path in script.included}  # checked as parts of other scripts
for path in scripts.keys() - included:
    target = Path(sys.argv[1]) / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(scripts[path].source)
