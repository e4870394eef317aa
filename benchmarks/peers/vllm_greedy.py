"""vLLM in this process, one thread, its sequences in one batch.

Argument: an order with ``model`` (a directory), ``dtype`` (fp32, bf16), ``slots`` and ``context`` (tokens of one
sequence). Each line on stdin has ``prompts`` (lists of ids) and ``tokens``; one line back: ``seconds``, ``cpu_s``,
``outputs`` (ids).
"""

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def started(order: dict[str, Any]) -> LLM:
    """The model, loaded; every option not named here as vLLM has it by itself. Nothing of an earlier prompt is used
    again, and nothing is compiled: that takes minutes, of which some come with each new number of sequences."""
    return LLM(
        order["model"],
        dtype=DTYPES[order["dtype"]],
        max_num_seqs=order["slots"],
        max_model_len=order["context"],
        enable_prefix_caching=False,
        enforce_eager=True,
    )


def main() -> None:
    llm = started(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        count = wish["tokens"]
        greedy = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in wish["prompts"]]
        began, cpu = time.perf_counter(), time.process_time()
        found = llm.generate(prompts, greedy, use_tqdm=False)
        took, used = time.perf_counter() - began, time.process_time() - cpu
        outputs = [list(each.outputs[0].token_ids) for each in found]
        print(json.dumps({"seconds": took, "cpu_s": used, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
