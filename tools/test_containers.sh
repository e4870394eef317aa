#!/bin/sh
# The tests of containers that CI runs: `make test-containers`. Where no engine works (a docker command without its
# daemon is none) root has the system's package manager install podman. What cannot be had, or does not work here, is
# said and is no error.
set -eu

cd "$(dirname "$0")/.."
install_s=240 probe_s=180 disk_mb=4000
packages='podman runc'
driver=tests/integration/test_containers_driver.py escapes=tests/integration/test_containers.py

say() { printf 'containers: %s\n' "$*"; }
skip() {
    printf '=== containers: SKIPPED, no test was run: %s ===\n' "$*"
    exit 0
}

has_podman() { command -v podman >/dev/null 2>&1; }

# One command, killed with all that it has started when its time is over.
apt() { timeout -k 10 "$install_s" apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::Retries=1 "$@" </dev/null 2>&1; }

install() {
    [ "$(id -u)" = 0 ] || skip "$reason; only root can install podman"
    command -v apt-get >/dev/null 2>&1 || skip "$reason; there is no apt-get to install podman with"
    say "installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    said=$(apt update) || skip "apt-get update failed: $(last "$said")"
    # shellcheck disable=SC2086 # several package names
    said=$(apt install -y --no-install-recommends $packages) || skip "apt-get install $packages failed: $(last "$said")"
    has_podman || skip "apt-get installed no podman"
}

last() { printf '%s\n' "$1" | tail -n 2 | tr '\n' ' '; }

why_not() { # why no engine works: a container is run to find out
    timeout -k 10 "$probe_s" .venv/bin/python -c 'from sllm_invoker.containers import probe; print(probe.why_not() or "")' ||
        echo "the probe failed, or has not ended within $probe_s s"
}

reason=$(why_not)
if [ -n "$reason" ] && ! has_podman; then
    install
    reason=$(why_not)
fi
[ -z "$reason" ] || skip "$reason"
free=$(df -Pm /var/lib | awk 'NR == 2 { print $4 }')
[ "$free" -ge "$disk_mb" ] || skip "the image needs about $disk_mb MB of disk, $free MB are free below /var/lib"
exec .venv/bin/python -m pytest -q -p no:cacheprovider \
    "$driver::test_limits_are_those_of_the_function_at_once" \
    "$driver::test_an_image_that_is_not_there_is_the_engines_own_error" \
    "$escapes::test_nothing_can_be_reached_over_the_network" \
    "$escapes::test_what_can_be_written_to_has_a_limit" \
    "$escapes::test_the_host_is_not_to_be_seen"
