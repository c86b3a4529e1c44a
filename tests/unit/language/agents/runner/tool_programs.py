"""Programs that serve tools."""

from __future__ import annotations

import sys
import textwrap

SERVER = textwrap.dedent(
    """
    import json, sys, time
    print("starting"); print(42); print('"text"'); print("[1]"); print("[" * 5000); print("x" * 100)
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        name = asked["params"].get("name")
        if name == "sleep":
            continue
        if name == "flood":
            for _ in range(64):
                sys.stdout.write("x" * (1 << 20))
            print(flush=True)
        result = {"initialize": {"protocolVersion": "2025-03-26"},
                  "tools/list": {"tools": [{"name": n} for n in TOOLS]},
                  "tools/call": {"content": [{"type": "text", "text": str(asked["params"].get("arguments"))}]}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result[asked["method"]]}), flush=True)
    """
)


def command(*tools: str) -> list[str]:
    return [sys.executable, "-c", f"TOOLS = {list(tools)}\n{SERVER}"]
