"""guidellm as a load on an OpenAI-compatible server: requests of mixed lengths at random times, streamed.

What is asked comes as JSON on the command line (``target``, ``key``, ``model``, ``route``, ``tokenizer``, ``rate`` a
second, ``requests``, ``rounds``, ``prompt`` and ``output`` as [least, mean, most] tokens); one line of JSON goes out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def scenario(order: dict[str, Any], report: Path) -> dict[str, Any]:
    """guidellm's own file for it; a round is a benchmark of the same rate."""
    lengths = {
        f"{name}_tokens{suffix}": value
        for name, (least, mean, most) in (("prompt", order["prompt"]), ("output", order["output"]))
        for suffix, value in (("", mean), ("_min", least), ("_max", most), ("_stdev", (most - least) // 3))
    }
    return {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": order["target"],
                "api_key": order["key"],
                "model": order["model"],
                "request_format": order["route"],
                "validate_backend": False,  # it asks for /health, which is no route of OpenAI's
            },
            "profile": {"kind": "poisson", "rate": [order["rate"]] * order["rounds"]},
            "constraints": [{"kind": "max_requests", "count": order["requests"]}],
            "tokenizer": {"kind": "huggingface_auto", "model": order["tokenizer"]},
            "data": [{"kind": "synthetic_text", **lengths}],
            "outputs": [{"kind": "json", "path": str(report)}],
        }
    }


def told(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Of one round: how its requests ended, and what guidellm measured of each that succeeded."""
    done = benchmark["requests"]["successful"]
    bodies = [json.loads(each["request_args"])["body"] for each in done]
    return {
        "totals": benchmark["metrics"]["request_totals"],
        "asked": [body.get("max_tokens") or body["max_completion_tokens"] for body in bodies],
        "tokens": [each["output_tokens"] for each in done],
        "cached": sum(each["cached_tokens"] or 0 for each in done),
        "ttft_ms": [each["time_to_first_token_ms"] for each in done],
        "itl_ms": [each["inter_token_latency_ms"] for each in done],
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bg-") as name:
        report, asked = Path(name) / "report.json", Path(name) / "scenario.json"
        asked.write_text(json.dumps(scenario(order, report)))
        command = [sys.executable, "-m", "guidellm", "run", "-c", str(asked), "--disable-console"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        found = json.loads(report.read_text())["benchmarks"]
    print(json.dumps({"rounds": [told(each) for each in found]}), flush=True)


if __name__ == "__main__":
    main()
