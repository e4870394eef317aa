#!/usr/bin/env bash
# What Google Cloud runs as this machine goes away (preempted, deleted by its group), while network and metadata are still
# there: stopping the service drains the node. watch.sh may have begun it; both then wait for the same end.
set -euo pipefail
exec systemctl stop sllm-node.service
