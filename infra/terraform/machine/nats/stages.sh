# shellcheck shell=bash disable=SC2154
# The stages of a NATS server. Sourced by boot.sh, whose settings and functions they use.

readonly WAIT_S=300

# The disk with the streams: attached after the machine was started, formatted once, never again.
volume() {
    local device=/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${VOLUME/-/}
    mkdir -p "$MOUNT"
    if ! mountpoint --quiet "$MOUNT"; then
        udevadm wait --timeout="$WAIT_S" "$device"
        [ -n "$(blkid --match-tag TYPE --output value "$device")" ] || mkfs.xfs -q "$device"
        mount -o noatime "$device" "$MOUNT"
    fi
    xfs_growfs "$MOUNT" >/dev/null # the volume may have been made larger: the server is told of all of it
    mkdir -p "$MOUNT/jetstream"
    chown "$ACCOUNT" "$MOUNT" "$MOUNT/jetstream"
}

# Below RUN, which is memory: nothing of it is on a disk.
credentials() {
    local name
    for name in ca cert key accounts; do
        cloud_secret "$PARAMETER_PREFIX/nats/$name" | put "$RUN/nats-$name"
    done
}

configuration() {
    local routes
    # shellcheck disable=SC2086,SC2153 # one word for each server
    routes=$(printf '"tls://%s:6222", ' $ROUTES)
    # What the server that `sllm up` starts is told as well.
    "$PREFIX/current/bin/python" -m sllm_runtime.platform.nats_settings "$MOUNT/jetstream" "$MAX_FILE_STORE" |
        put "$RUN/nats-settings"
    put "$RUN/nats.conf" <<EOF
server_name: $SERVER
listen: 0.0.0.0:4222
http: 127.0.0.1:8222
lame_duck_duration: "30s"
tls { cert_file: "$RUN/nats-cert", key_file: "$RUN/nats-key", ca_file: "$RUN/nats-ca", timeout: 5 }
cluster {
  name: $CLUSTER
  listen: 0.0.0.0:6222
  no_advertise: true # clients know all names, which stay when a server is replaced; addresses do not
  routes: [ ${routes%, } ]
  tls { cert_file: "$RUN/nats-cert", key_file: "$RUN/nats-key", ca_file: "$RUN/nats-ca", verify: true, timeout: 5 }
}
include ./nats-settings
include ./nats-accounts
EOF
    "$PREFIX/current/bin/nats-server" -t -c "$RUN/nats.conf"
}
