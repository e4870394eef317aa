# shellcheck shell=bash disable=SC2154
# The stages of a GPU node. Sourced by boot.sh, whose settings and functions they use.

readonly ARRAY=/dev/md/sllm

instance_disks() {
    lsblk --nodeps --noheadings --output PATH,MODEL | sed -n "s/^\([^ ]*\)  *$CLOUD_DISKS *\$/\1/p"
}

release() { # DISK: take what lies on it from who holds it
    local holder kind held
    held=$(lsblk --noheadings --list --output PATH,TYPE "$1" | tail -n +2 | sort -u)
    while read -r holder kind; do
        case $kind in
        raid*) mdadm --stop "$holder" ;;
        lvm) umount --quiet "$holder" || true; dmsetup remove "$holder" ;;
        esac
    done <<<"$held"
    wipefs --all --quiet "$1"
}

# The SSD tier. What was there before a reboot is not trusted, and after a stop the disks are new ones.
storage() {
    mkdir -p "$MOUNT"
    mountpoint --quiet "$MOUNT" || make_tier
    chown "$ACCOUNT" "$MOUNT"
    chmod 700 "$MOUNT"
}

make_tier() {
    local found disks disk device
    found=$(instance_disks)
    if [ -z "$found" ]; then
        say "no instance-store disk: the SSD tier lies on the root volume"
        return 0
    fi
    mapfile -t disks <<<"$found"
    for disk in "${disks[@]}"; do release "$disk"; done
    device=${disks[0]}
    if [ "${#disks[@]}" -gt 1 ]; then
        device=$ARRAY
        mdadm --create "$device" --run --force --homehost=any --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
    fi
    mkfs.xfs -f -K -q "$device"
    mount -o noatime,nodiscard "$device" "$MOUNT"
}

# Chunks of the DRAM pool are shared memory that asks for huge pages (docs/loaderd.md).
memory() {
    printf 'advise\n' >"$HUGE_PAGES/shmem_enabled"
}

# Functions run as the daemons' account: only namespaces keep from them what that account may read. Ubuntu's AppArmor gives
# programs without a profile none, or one without rights.
namespaces() {
    local group
    group=$(id --group "$ACCOUNT")
    if [ -e "$USERNS_RESTRICTED" ]; then
        printf 'kernel.apparmor_restrict_unprivileged_userns = 0\n' >"$SYSCTL_FILE" # for who applies them all again
        printf '0\n' >"$USERNS_RESTRICTED"
    fi
    # As the invoker makes one for its fork server, from which each worker goes to others.
    setpriv --reuid "$ACCOUNT" --regid "$group" --clear-groups --no-new-privs \
        unshare --user --map-current-user --keep-caps --pid --fork --kill-child --mount-proc \
        unshare --mount --net true || {
        say "the kernel gives $ACCOUNT no namespaces: functions would see this node's own secrets" >&2
        return 1
    }
}

gpus() {
    nvidia-smi --list-gpus | grep --quiet '^GPU ' # a machine whose driver found none is no node
    nvidia-smi --persistence-mode=1 >/dev/null
    # /dev/nvidia-uvm, at each boot and before the description: libcuda would have a setuid program make it, which the
    # service's NoNewPrivileges and a function's namespace make powerless. Where there is none the image makes it itself.
    nvidia-modprobe --unified-memory --create-nvidia-device-file=0 || say '/dev/nvidia-uvm is left to the image'
    (umask 022; mkdir -p "$(dirname "$CDI_FILE")"; nvidia-ctk --quiet cdi generate --output="$CDI_FILE.new")
    chmod 644 "$CDI_FILE.new" # container engines of any account read it
    mv "$CDI_FILE.new" "$CDI_FILE"
}

# Below RUN, which is memory: nothing of it is on a disk.
credentials() {
    local node
    node=$(cloud_node)
    cloud_secret "$PARAMETER_PREFIX/nats/ca" | put "$RUN/nats-ca.pem"
    cloud_secret "$PARAMETER_PREFIX/node/key" | "$PREFIX/current/bin/python" -m sllm_runtime.platform.cluster_keys \
        join "$node" | put "$RUN/nats.creds"
}

environment() {
    local node address labels token more
    node=$(cloud_node)
    address=$(cloud_address)
    labels=$(cloud_labels)
    token=$(cloud_secret "$PARAMETER_PREFIX/node/peer-token")
    more=$(cloud_environment)
    {
        printf 'SLLM_NODE=%s\n' "$node"
        # shellcheck disable=SC2153 # the first is the pool's, of the settings
        printf 'SLLM_LABELS=%s,%s\n' "$LABELS" "$labels"
        printf 'SLLM_PEER_LISTEN=%s:%s\n' "$address" "$PEER_PORT"
        printf 'SLLM_PEER_TOKEN=%s\n' "$token"
        printf '%s' "${more:+$more
}"
    } | put "$RUN/node.env" "$EUID" # root's: systemd reads it, functions run as the daemons' account
    : | put "$RUN/ready" # node.sh writes it
    chmod 600 "$RUN/ready"
}
