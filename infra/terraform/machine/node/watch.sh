#!/usr/bin/env bash
# Tell the cloud when this node is ready; when the cloud takes it away, drain it and say when that is done.
#
# Stopping the service is the drain: on SIGTERM the node says that it leaves, the controller starts nothing more on it
# and moves the calls that can move. So the machine needs no access to the API for it.
set -euo pipefail
settings=${1:-/etc/sllm/boot.env}
here=$(dirname "$0")
# shellcheck source=/dev/null
. "$settings"
# shellcheck source=/dev/null
. "$here/cloud.sh"
readonly EVERY_S=5

say() { printf 'sllm-watch: %s\n' "$*"; }

arrived=''
while ! reason=$(cloud_leaving); do
    # Until the group has taken it: one that is not told ends a node that is ready when its patience is over.
    if [ -z "$arrived" ] && [ -s "$RUN/ready" ] && cloud_arrived; then
        arrived=yes
        say "READY $(cut -d ' ' -f 1 /proc/uptime) s after boot"
    fi
    sleep "$EVERY_S"
done
say "leaving: $reason; draining"
systemctl stop sllm-node.service
say "drained"
for _ in {1..6}; do
    if cloud_gone; then exit 0; fi
    sleep "$EVERY_S"
done
say "the group could not be told; it goes on by itself when its hook's time is over"
