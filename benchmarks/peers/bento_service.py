"""The model as a BentoML service; its directory stands in BENCH_MODEL."""

import os
from collections.abc import Generator

import bentoml
from greedy import Greedy


@bentoml.service(workers=1, traffic={"timeout": 120}, metrics={"enabled": False})
class Coder:
    """Streams tokens as text."""

    def __init__(self) -> None:
        self.greedy = Greedy(os.environ["BENCH_MODEL"])

    @bentoml.api
    def generate(self, prompt: str, count: int) -> Generator[str, None, None]:
        yield from self.greedy.stream(prompt, count)
