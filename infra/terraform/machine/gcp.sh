# shellcheck shell=bash
# What boot.sh and watch.sh ask of Google Cloud. Sourced; needs REGION. The same functions as aws.sh.

# shellcheck disable=SC2034 # boot.sh reads it
readonly CLOUD_DISKS='nvme_card[0-9]*'

_metadata() { # PATH: what the instance's metadata say; fails where they say nothing
    curl --silent --fail --max-time 5 --header 'Metadata-Flavor: Google' \
        "http://169.254.169.254/computeMetadata/v1/instance/$1"
}

cloud_node() { _metadata name; }

cloud_address() { _metadata network-interfaces/0/ip; }

cloud_labels() { # zone, type and market of this machine
    local zone type market
    zone=$(_metadata zone) && type=$(_metadata machine-type) && market=$(_metadata scheduling/preemptible) || return 1
    case $market in TRUE) market=spot ;; *) market=on-demand ;; esac
    printf 'zone=%s,type=%s,market=%s\n' "${zone##*/}" "${type##*/}" "$market"
}

cloud_fetch() { # URL FILE
    gcloud storage cp --quiet --no-user-output-enabled "$1" "$2"
}

cloud_secret() { # PATH: the value of the secret that is called like it, with hyphens for slashes
    local name=${1#/}
    gcloud secrets versions access latest --quiet --secret "${name//\//-}"
}

cloud_environment() { # what the daemons need to read models; their bucket speaks S3's language to who has a key of it
    local id key
    [ -n "${STORAGE_KEY:-}" ] || return 0
    id=$(cloud_secret "$PARAMETER_PREFIX/node/storage-id") || return 1
    key=$(cloud_secret "$PARAMETER_PREFIX/node/storage-key") || return 1
    printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n' "$id" "$key"
}

cloud_leaving() { # why this machine goes away; fails while it stays
    local said
    if said=$(_metadata preempted) && [ "$said" = TRUE ]; then
        printf 'it is preempted\n'
    elif said=$(_metadata maintenance-event) && [ "$said" = TERMINATE_ON_HOST_MAINTENANCE ]; then
        printf 'its host is maintained\n'
    else
        return 1
    fi
}

# A managed instance group waits for nobody: health checks and the machine's own shutdown are all there is.
cloud_arrived() { :; }

cloud_failed() { :; }

cloud_gone() { :; }
