#!/usr/bin/env bash
# Starts a recipe on every host of a list, and stops it everywhere when it fails on one of them.
#
#   examples/launch/ssh.sh HOSTS [NAME=VALUE ...] RECIPE [FLAG ...]
#
# HOSTS has a host a line, as ssh takes it; the first is node 0. The project lies in the same folder on all of them.
# NAME=VALUE are variables for the recipe. What each host says goes to LOG_DIR/<number>-<host>.log.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

usage() {
    echo "usage: ${BASH_SOURCE[0]} HOSTS [NAME=VALUE ...] RECIPE [FLAG ...]" >&2
    exit 2
}

(($# >= 2)) || usage
[[ -r $1 ]] || { echo "error: cannot read the list of hosts $1" >&2 && exit 2; }
mapfile -t hosts < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$1")
shift
((${#hosts[@]})) || { echo "error: the list of hosts is empty" >&2 && exit 2; }
variables=()
while [[ ${1:-} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
    variables+=("$1")
    shift
done
(($#)) || usage

MASTER_ADDR=${MASTER_ADDR:-${hosts[0]#*@}}
MASTER_PORT=${MASTER_PORT:-29500}
LOG_DIR=${LOG_DIR:-$project/logs/launch-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$LOG_DIR"

# On a host: the recipe in a process group of its own, which ends when the connection does. One line, so that %q quotes
# it for any login shell.
# shellcheck disable=SC2016  # it is the host's shell that expands it
remote='exec 3<&0; setsid "$@" </dev/null 3<&- & recipe=$!; { cat <&3; kill -TERM -- "-$recipe"; } >/dev/null 2>&1 & '
# shellcheck disable=SC2016
remote+='watch=$!; wait "$recipe"; status=$?; kill "$watch" 2>/dev/null; exit "$status"'

# All connections read from this pipe. It stays open as long as this process lives and wants the run.
mkfifo "$LOG_DIR/.open"
exec {open}<>"$LOG_DIR/.open"
exec {end}<"$LOG_DIR/.open"
rm "$LOG_DIR/.open"
stop() {
    [[ -z ${open:-} ]] || exec {open}>&-
    open=
}
trap 'stop; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

declare -A names
for ((node = 0; node < ${#hosts[@]}; node++)); do
    log=$LOG_DIR/$node-${hosts[node]#*@}.log
    command=(env "NNODES=${#hosts[@]}" "NODE_RANK=$node" "MASTER_ADDR=$MASTER_ADDR" "MASTER_PORT=$MASTER_PORT")
    command+=("${variables[@]}" bash "$@")
    printf -v line '%q ' bash -c "cd $(printf %q "$project") && $remote" launch "${command[@]}"
    ssh -o BatchMode=yes -o ServerAliveInterval=15 "${hosts[node]}" "$line" <&"$end" >"$log" 2>&1 {open}>&- {end}<&- &
    names[$!]="node $node (${hosts[node]}), $log"
done
echo "started on ${#hosts[@]} hosts; logs in $LOG_DIR"

status=0
for ((left = ${#hosts[@]}; left > 0; left--)); do
    code=0
    wait -n -p ended "${!names[@]}" || code=$?
    if ((code)); then
        if ((!status)); then
            status=$code
            echo "error: exit status $code of ${names[$ended]}; the others are stopped" >&2
            tail -n 5 "${names[$ended]##*, }" >&2
        fi
        stop
    fi
    unset "names[$ended]"
done
exit "$status"
