#!/bin/sh
# Waits until the server in this container has no open request, at most SECONDS.
#
#   drain.sh SECONDS [ADDRESS]
set -eu
seconds=$1 address=${2-http://127.0.0.1:8000} open=some
while [ "$seconds" -gt 0 ]; do
    # Whatever labels it has; a server that does not answer has nothing to wait for.
    open=$(wget --no-proxy -q -T 4 -O - "$address/metrics" |
        awk '/^lexshard_admitted_sequences[ {]/ { open += $NF } END { print open + 0 }')
    [ "$open" != 0 ] || exit 0
    sleep 1
    seconds=$((seconds - 1))
done
echo "drain.sh: $open requests are still open" >&2
