"""What engines are told, word for word: whoever changes the isolation of sandboxes changes this file."""

from dataclasses import replace
from pathlib import Path

from sllm_invoker.containers import arguments
from sllm_invoker.containers.arguments import ContainerSpec, Owner, User

OWNER = Owner(node="n1", place="/data/n1", boot="b7")
SPEC = ContainerSpec(
    name="sb-1",
    image="localhost/sllm-base:abc",
    owner=OWNER,
    rendezvous=Path("/data/n1/sandboxes/sb-1/door"),
    user=User(uid=65534, gid=65534),
    memory=1 << 30,
    cpu=2.0,
    pids=256,
    tmp=64 << 20,
    files=20000,
    processes=32768,
    monitor=Path("/data/n1/sandboxes/sb-1/monitor"),
)
COMMAND = ("python", "-m", "worker")

PODMAN = """
run --detach --pull never --name sb-1
--label sllm.node=n1 --label sllm.place=/data/n1 --label sllm.boot=b7 --label sllm.sandbox=sb-1
--user 65534:65534
--network none --hostname sandbox --read-only --read-only-tmpfs=false --no-hosts --http-proxy=false
--tmpfs /tmp:rw,nosuid,nodev,size=67108864,mode=1777 --shm-size 67108864
--volume /data/n1/sandboxes/sb-1/door:/run/sllm:ro
--cap-drop ALL --security-opt no-new-privileges --ipc private
--memory 1073741824 --memory-swap 1073741824 --cpus 2 --pids-limit 256
--ulimit nofile=20000:20000 --ulimit nproc=32768:32768 --ulimit core=0:0
--log-driver json-file --log-opt max-size=64k
--conmon-pidfile /data/n1/sandboxes/sb-1/monitor
localhost/sllm-base:abc python -m worker
"""
DOCKER = """
run --detach --pull never --name sb-1
--label sllm.node=n1 --label sllm.place=/data/n1 --label sllm.boot=b7 --label sllm.sandbox=sb-1
--user 65534:65534
--network none --hostname sandbox --read-only
--tmpfs /tmp:rw,nosuid,nodev,size=67108864,mode=1777 --shm-size 67108864
--volume /data/n1/sandboxes/sb-1/door:/run/sllm:ro
--cap-drop ALL --security-opt no-new-privileges --ipc private
--memory 1073741824 --memory-swap 1073741824 --cpus 2 --pids-limit 256
--ulimit nofile=20000:20000 --ulimit nproc=32768:32768 --ulimit core=0:0
--log-driver json-file --log-opt max-size=64k
localhost/sllm-base:abc python -m worker
"""


def test_podman_is_told_this() -> None:
    assert arguments.run("podman", SPEC, COMMAND) == tuple(PODMAN.split())


def test_docker_is_told_this() -> None:
    assert arguments.run("docker", SPEC, COMMAND) == tuple(DOCKER.split())


def test_a_user_of_its_own_stays_who_it_is_without_root() -> None:
    kept = replace(SPEC, user=User(uid=1000, gid=100, kept=True))
    words = arguments.run("podman", kept, COMMAND)
    assert words[words.index("--userns") : words.index("--userns") + 4] == ("--userns", "keep-id", "--user", "1000:100")


def test_devices_are_named_as_each_engine_names_them() -> None:
    wishing = replace(SPEC, gpus=(0, 3))
    podman, docker = (arguments.run(kind, wishing, COMMAND) for kind in ("podman", "docker"))
    assert [word for word in podman if "nvidia" in word] == ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]
    assert docker[docker.index("--gpus") + 1] == '"device=0,3"'


def test_only_who_asks_gets_a_network() -> None:
    plain, asking = (arguments.run("podman", replace(SPEC, network=wanted), COMMAND) for wanted in (False, True))
    at = plain.index("--network") + 1
    assert (plain[at], asking[at]) == ("none", "bridge")
    assert plain[:at] + asking[at : at + 1] + plain[at + 1 :] == asking  # nothing else changes


def test_members_of_a_cluster_share_the_network_of_the_first() -> None:
    """Which has none: they have its loopback, and its name, beside which docker takes no other."""
    plain, joined = (arguments.run("docker", replace(SPEC, cluster=first), COMMAND) for first in ("", "sb-0"))
    at = plain.index("--network")
    assert plain[at : at + 4] == ("--network", "none", "--hostname", "sandbox")
    assert joined == (*plain[:at], "--network", "container:sb-0", *plain[at + 4 :])
    asking = arguments.run("podman", replace(SPEC, cluster="sb-0", network=True), COMMAND)
    assert "container:sb-0" in asking
    assert "bridge" not in asking


def test_without_root_they_share_the_user_namespace_that_the_network_belongs_to() -> None:
    kept = replace(SPEC, user=User(uid=1000, gid=100, kept=True), cluster="sb-0")
    words = arguments.run("podman", kept, COMMAND)
    at = words.index("--userns")
    assert words[at : at + 4] == ("--userns", "container:sb-0", "--user", "1000:100")


def test_what_is_ours_is_found_by_its_label() -> None:
    listing = ("ps", "--all", "--filter", "label=sllm.place", "--format")
    assert arguments.places("podman") == (*listing, '{{.Names}}\t{{index .Labels "sllm.place"}}')
    assert arguments.places("docker") == (*listing, '{{.Names}}\t{{.Label "sllm.place"}}')


def test_removing_waits_for_nobody() -> None:
    assert arguments.remove("podman", "sb-1") == ("rm", "--force", "--ignore", "--depend", "--time", "0", "sb-1")
    assert arguments.remove("docker", "sb-1") == ("rm", "--force", "sb-1")
