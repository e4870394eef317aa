# shellcheck shell=bash disable=SC2154
# The stages of a machine with a gateway and a controller. Sourced by boot.sh, whose settings and functions they use.

join() { # KIND NAME: credentials of its own
    cloud_secret "$PARAMETER_PREFIX/$1/key" |
        "$PREFIX/current/bin/python" -m sllm_runtime.platform.cluster_keys join "$2" | put "$RUN/$1.creds"
}

# Below RUN, which is memory: nothing of it is on a disk.
credentials() {
    local node
    node=$(cloud_node)
    mkdir -p "$MOUNT"
    chown "$ACCOUNT" "$MOUNT"
    chmod 700 "$MOUNT"
    cloud_secret "$PARAMETER_PREFIX/nats/ca" | put "$RUN/nats-ca.pem"
    cloud_secret "$PARAMETER_PREFIX/gateway/token" | put "$RUN/token"
    cloud_secret "$PARAMETER_PREFIX/controller/secrets-key" | put "$RUN/secrets-key"
    join gateway "g-$node"
    join controller "c-$node"
}

environment() {
    local node address
    node=$(cloud_node)
    address=$(cloud_address)
    {
        printf 'SLLM_GATEWAY=g-%s\n' "$node"
        printf 'SLLM_NATS_CREDS=%s\n' "$RUN/gateway.creds"
        printf 'SLLM_HOST=%s\n' "$address"
        printf 'SLLM_PORT=%s\n' "$PORT"
        printf 'SLLM_TOKEN_FILE=%s\n' "$RUN/token"
    } | put "$RUN/gateway.env"
    {
        printf 'SLLM_CONTROLLER=c-%s\n' "$node"
        printf 'SLLM_SECRETS_KEY=%s\n' "$RUN/secrets-key"
        printf 'SLLM_NATS_CREDS=%s\n' "$RUN/controller.creds"
    } | put "$RUN/controller.env"
}
