#!/usr/bin/env bash
# Run the node. `sllm up` writes to descriptor 3 once it is ready, which watch.sh waits for.
set -euo pipefail
settings=${1:-/etc/sllm/boot.env}
# shellcheck source=/dev/null
. "$settings"
export SLLM_READY_FD=3
exec "$PREFIX/current/bin/sllm" up --node 3>"$RUN/ready"
