#!/usr/bin/env bash
# Tell the group when this gateway serves calls: only then does it take another one's place. From then on kill one that
# does not answer at all; systemd starts it anew.
#
# A gateway that answers that it is not ready is left alone. While NATS is away none is ready, and new machines would not
# be either.
set -euo pipefail
settings=${1:-/etc/sllm/boot.env}
here=$(dirname "$0")
# shellcheck source=/dev/null
. "$settings"
# shellcheck source=/dev/null
. "$here/cloud.sh"
readonly EVERY_S=5 MOST_SILENT=6

say() { printf 'sllm-watch: %s\n' "$*"; }

address=$(cloud_address)

answers() { # PATH
    curl --silent --fail --max-time 5 --output /dev/null "http://$address:$PORT/$1"
}

arrived='' silent=0
while true; do
    if [ -z "$arrived" ]; then
        if answers readyz && cloud_arrived; then
            arrived=yes
            say "READY $(cut -d ' ' -f 1 /proc/uptime) s after boot"
        fi
    elif answers livez || ! systemctl is-active --quiet sllm-gateway.service; then
        silent=0 # also one that is being stopped: it listens no more, and has its drain for the calls it has
    else
        silent=$((silent + 1))
    fi
    if [ "$silent" -ge "$MOST_SILENT" ]; then
        say "the gateway has not answered $silent times; it is killed"
        systemctl kill --signal=KILL sllm-gateway.service || say 'it was not running'
        silent=0
    fi
    sleep "$EVERY_S"
done
