#!/usr/bin/env bash
# Make a new cluster's secrets and store them in the parameter store, once, before its machines are made. Nothing of them
# stays on this machine, and Terraform never sees them.
#
#   new-secrets.sh PREFIX REGION [DOMAIN [KMS_KEY_ID]]    as new-secrets.sh /sllm/prod us-east-1
#
# Needs openssl, the AWS command line, and Python with sllm[server] (PYTHON=python3).
set -euo pipefail
umask 077
[ "$#" -ge 2 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
prefix=$1 region=$2 domain=${3:-sllm.internal} key=${4:-}
readonly DAYS=3650
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
secrets=$work/secrets
names=()
for name in nats/ca nats/cert nats/key nats/accounts operator/seed controller/key controller/secrets-key \
    gateway/key gateway/token node/key node/peer-token; do
    names+=("$prefix/$name")
done

store() { # VERB WORDS: ask the parameter store
    local verb=$1
    shift
    aws ssm "$verb" --region "$region" "$@"
}

# All of them or none: those of two runs, whose keys do not belong together, are no cluster's.
there=''
for ((at = 0; at < ${#names[@]}; at += 10)); do # one request takes ten
    there+=" $(store get-parameters --names "${names[@]:at:10}" --query 'Parameters[].Name' --output text)"
done
if [ -n "${there//[[:space:]]/}" ]; then
    printf 'there are already:' >&2
    # shellcheck disable=SC2086 # one word for each name
    printf ' %s' $there >&2
    printf '\nA cluster that has its secrets keeps them. If these are of a run that broke off, delete all of them.\n' >&2
    exit 1
fi

"${PYTHON:-python3}" -m sllm_runtime.platform.cluster_keys new "$secrets"

new=(openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
"${new[@]}" -x509 -days "$DAYS" -subj "/CN=sllm ${prefix//\// }" -addext keyUsage=critical,keyCertSign,cRLSign \
    -keyout "$work/ca.key" -out "$secrets/nats/ca" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
"${new[@]}" -subj "/CN=nats.$domain" -keyout "$secrets/nats/key" -out "$work/server.csr" 2>"$work/log" ||
    { cat "$work/log" >&2; exit 1; }
printf 'subjectAltName=DNS:nats-0.%s,DNS:nats-1.%s,DNS:nats-2.%s\nextendedKeyUsage=serverAuth,clientAuth\n' \
    "$domain" "$domain" "$domain" >"$work/extensions"
openssl x509 -req -in "$work/server.csr" -CA "$secrets/nats/ca" -CAkey "$work/ca.key" -set_serial 1 \
    -days "$DAYS" -extfile "$work/extensions" -out "$secrets/nats/cert" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }

stored='' coming=''
take_back() { # a run that breaks off leaves nothing that the next one would stumble over
    local name value left=''
    # Of the one that was on its way nobody knows whether it arrived. What has this run's value is this run's.
    if [ -n "$coming" ]; then
        if ! value=$(store get-parameters --names "$coming" --with-decryption --query 'Parameters[0].Value' \
            --output text); then
            left=$coming
        elif [ "$value" = "$(<"$secrets${coming#"$prefix"}")" ]; then
            stored+=" $coming"
        fi
    fi
    for name in $stored; do
        if store delete-parameter --name "$name" >/dev/null; then
            printf 'taken back: %s\n' "$name" >&2
        else
            left+=" $name"
        fi
    done
    # shellcheck disable=SC2086 # likewise
    [ -z "$left" ] || printf 'not taken back, delete before the next run: %s\n' $left >&2
}
trap 'take_back; rm -rf "$work"' EXIT

# Without --overwrite: nobody else's are lost.
for name in "${names[@]}"; do
    coming=$name
    store put-parameter --name "$name" --type SecureString --tier Intelligent-Tiering \
        ${key:+--key-id "$key"} --value "file://$secrets${name#"$prefix"}" >/dev/null
    stored+=" $name" coming=''
    printf 'stored %s\n' "$name"
done
stored='' # a cluster's
