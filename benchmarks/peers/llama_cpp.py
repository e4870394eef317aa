"""llama.cpp's server in this process, one thread, its sequences in one batch.

Argument: an order with ``file`` (a GGUF), ``slots`` and ``context`` (tokens of one sequence). Each line on stdin has
``prompts`` (lists of ids) and ``tokens``; one line back: ``seconds``, ``cpu_s``, ``outputs`` (ids).
"""

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

ANSWER_S = 300.0


def started(order: dict[str, Any]) -> xllamacpp.Server:
    """A server with the model loaded, every option not named here as llama.cpp has it by itself."""
    params = xllamacpp.CommonParams()
    params.model.path = order["file"]
    params.n_parallel = order["slots"]
    params.n_ctx = order["slots"] * order["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = True
    params.verbosity = 0
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], tokens: int) -> list[int]:
    """Greedy, exactly so many tokens, nothing of an earlier prompt used again. By the server's own route: the wheel's
    function tells text alone."""
    asked = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: list[int] = json.load(answer)["tokens"]
    return found


def main() -> None:
    order = json.loads(sys.argv[1])
    server = started(order)  # it ends with its last reference
    address = server.listening_address
    with ThreadPoolExecutor(order["slots"]) as pool:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            wish = json.loads(line)
            began, cpu = time.perf_counter(), time.process_time()
            asked = [pool.submit(complete, address, prompt, wish["tokens"]) for prompt in wish["prompts"]]
            outputs = [each.result() for each in asked]
            took, used = time.perf_counter() - began, time.process_time() - cpu
            print(json.dumps({"seconds": took, "cpu_s": used, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
