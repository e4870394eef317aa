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

# Without --overwrite: a cluster that has its secrets keeps them, and this stops at the first.
for name in nats/ca nats/cert nats/key nats/accounts operator/seed controller/key controller/secrets-key \
    gateway/key gateway/token node/key node/peer-token; do
    aws ssm put-parameter --region "$region" --name "$prefix/$name" --type SecureString --tier Intelligent-Tiering \
        ${key:+--key-id "$key"} --value "file://$secrets/$name" >/dev/null
    printf 'stored %s/%s\n' "$prefix" "$name"
done
