"""The reference for the gateway benchmark: a starlette endpoint that makes the same tokens itself and streams them.

``python -m benchmarks.bare --port N``; prints ``{"ready": true}``. ``POST /stream`` takes ``{"count", "interval"}``.
``POST /v1/chat/completions`` gives the same tokens in OpenAI's shape (count and interval are the last message's text),
as the upstream of proxies.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.functions.paced.function import tokens

BACKLOG = 2048


async def stream(request: Request) -> StreamingResponse:
    """One SSE event per token."""
    asked = await request.json()

    async def events() -> AsyncIterator[bytes]:
        async for token in tokens(asked["count"], asked["interval"]):
            yield b'data: "%s"\n\n' % token.encode()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def chat(request: Request) -> StreamingResponse:
    """The same as chat completion chunks."""
    asked = json.loads((await request.json())["messages"][-1]["content"])

    def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "paced", "choices": [choice]}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    async def events() -> AsyncIterator[bytes]:
        async for token in tokens(asked["count"], asked["interval"]):
            yield chunk({"role": "assistant", "content": token})
        yield chunk({}, "stop") + b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def serve(port: int) -> None:
    """Until SIGTERM."""
    routes = [
        Route("/stream", stream, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes),
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=300,  # a proxy's idle connections are not closed under it
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listener:
        # Whoever connects from now on is served as soon as the loop turns.
        sys.stdout.write('{"ready": true}\n')
        sys.stdout.flush()
        await server.serve(sockets=[listener])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
