# shellcheck shell=bash
# What boot.sh and watch.sh ask of AWS. Sourced; needs REGION and GROUP.

# shellcheck disable=SC2034 # boot.sh reads it
readonly CLOUD_DISKS='Amazon EC2 NVMe Instance Storage'

_imds() { # PATH: what the instance's metadata say; fails where they say nothing
    local token
    token=$(curl --silent --fail --max-time 5 --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
        http://169.254.169.254/latest/api/token) || return 1
    curl --silent --fail --max-time 5 --header "X-aws-ec2-metadata-token: $token" \
        "http://169.254.169.254/latest/meta-data/$1"
}

cloud_node() { _imds instance-id; }

cloud_address() { _imds local-ipv4; }

cloud_labels() { # zone, type and market of this machine
    local zone type market
    zone=$(_imds placement/availability-zone) && type=$(_imds instance-type) &&
        market=$(_imds instance-life-cycle) || return 1
    printf 'zone=%s,type=%s,market=%s\n' "$zone" "$type" "$market"
}

cloud_fetch() { # URL FILE
    aws s3 cp --region "$REGION" --only-show-errors "$1" "$2"
}

cloud_secret() { # NAME: its value
    aws ssm get-parameter --region "$REGION" --name "$1" --with-decryption --query Parameter.Value --output text
}

cloud_environment() { :; } # the instance's role reads the bucket

cloud_leaving() { # why this machine goes away; fails while it stays
    local action state
    if action=$(_imds spot/instance-action); then
        printf 'spot notice %s\n' "$action"
    elif state=$(_imds autoscaling/target-lifecycle-state) && [ "$state" = Terminated ]; then
        printf 'its group ends it\n'
    else
        return 1
    fi
}

_lifecycle() { # HOOK RESULT: answer the group's hook; where none waits, or there is no group, nothing is to be answered
    local node said
    [ -n "$GROUP" ] || return 0
    node=$(cloud_node) || return 1
    said=$(aws autoscaling complete-lifecycle-action --region "$REGION" --auto-scaling-group-name "$GROUP" \
        --lifecycle-hook-name "$1" --lifecycle-action-result "$2" --instance-id "$node" 2>&1) && return 0
    case $said in *'No active Lifecycle Action'*) return 0 ;; esac
    printf '%s\n' "$said" >&2
    return 1
}

cloud_arrived() { _lifecycle arrive CONTINUE; }

cloud_failed() { _lifecycle arrive ABANDON; }

cloud_gone() { _lifecycle drain CONTINUE; }
