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
    if [ -z "$arrived" ] && [ -s "$RUN/ready" ]; then
        # Refused after a restart, when the group waits for nothing: the node is in service already.
        cloud_arrived || say "the group did not wait for this node"
        arrived=yes
        say "READY $(cut -d ' ' -f 1 /proc/uptime) s after boot"
    fi
    sleep "$EVERY_S"
done
say "leaving: $reason; draining"
systemctl stop sllm-node.service
say "drained"
cloud_gone || say "no lifecycle action waits for this node"
