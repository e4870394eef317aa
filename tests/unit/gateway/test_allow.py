"""A path may have several routes, each for methods of its own: what is allowed is what all of them take."""

from sllm_runtime.protocol.http import API
from tests.fixtures.nats import Nats
from tests.unit.gateway.peer import world


async def test_what_is_allowed_is_what_all_routes_of_a_path_take(nats: Nats) -> None:
    async with world(nats) as w:
        response = await w.http.get(f"{API}/secrets/token")
        listed = await w.http.put(f"{API}/functions")
    assert response.status_code == listed.status_code == 405
    assert response.headers["allow"] == "DELETE, PUT"
    assert {"GET", "POST"} <= set(listed.headers["allow"].split(", "))
