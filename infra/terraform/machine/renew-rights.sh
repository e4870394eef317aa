#!/usr/bin/env bash
# Give a cluster's components the rights that the installed release needs: the same account, signed anew. Its state, its
# streams and the credentials of its machines stay as they are. Then reboot the NATS servers, one at a time.
#
#   renew-rights.sh PREFIX REGION [KMS_KEY_ID]    as renew-rights.sh /sllm/prod us-east-1
#
# Needs the AWS command line, and Python with sllm[server] of that release (PYTHON=python3). Nothing stays on this machine.
set -euo pipefail
umask 077
[ "$#" -ge 2 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
prefix=$1 region=$2 key=${3:-}
secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT

for name in nats/accounts operator/seed; do
    mkdir -p "$secrets/${name%/*}"
    aws ssm get-parameter --region "$region" --name "$prefix/$name" --with-decryption --query Parameter.Value \
        --output text >"$secrets/$name"
done
"${PYTHON:-python3}" -m sllm_runtime.platform.cluster_keys renew "$secrets"
aws ssm put-parameter --region "$region" --name "$prefix/nats/accounts" --type SecureString --tier Intelligent-Tiering \
    --overwrite ${key:+--key-id "$key"} --value "file://$secrets/nats/accounts" >/dev/null
printf 'stored %s/nats/accounts; reboot the NATS servers one at a time\n' "$prefix"
