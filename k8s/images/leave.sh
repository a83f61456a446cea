#!/bin/sh
# The end of a pod in a Ray cluster: Serve gives its replicas no more requests, whichever pod they come
# through, starts others elsewhere where there is room, and lets open streams go on, at most SECONDS.
#
#   leave.sh SECONDS
set -eu
seconds=$1
began=$(date +%s)
# On a busy node the command alone may take more than 20 s.
if ! timeout $((seconds / 2 + 1)) ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION \
    --reason-message "its pod ends" --deadline-remaining-seconds "$seconds"; then
    echo "leave.sh: Ray does not let this node go; waiting for the requests of all replicas" >&2
    exec "$(dirname "$0")/drain.sh" $((seconds - $(date +%s) + began))
fi
seconds=$((seconds - $(date +%s) + began))
# A replica ends by itself after the last of its streams.
while pgrep -f '^ray::ServeReplica' >/dev/null; do
    if [ "$seconds" -le 0 ]; then
        echo "leave.sh: a replica still has streams" >&2
        exit 0
    fi
    sleep 1
    seconds=$((seconds - 1))
done
