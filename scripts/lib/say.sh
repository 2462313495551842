# shellcheck shell=bash
# What scripts say: progress and errors on stderr; stdout is for results.

say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

# usage: the comment at the top of the script.
usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
}

die() {
    say "$@"
    exit 1
}

# need_root: before anything is made, fetched or removed.
need_root() {
    if [ "$(id -u)" != 0 ]; then
        die "root is needed to mount, to make devices and to install packages: sudo $0"
    fi
}

# run_logged WHAT command…: say WHAT, keep the command's long output in a log, say how
# long it took.  On failure show the log's end, and return the command's status.
run_logged() {
    local what=$1 log status=0 start=$SECONDS
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/btrfs-ublk-setup-XXXXXX.log")
    say "$what ..."
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if ((status == 0)); then
        rm -f "$log"
        say "$what: done in $((SECONDS - start)) s"
        return 0
    fi
    tail -n 20 "$log" | sed 's/^/    /' >&2
    say "$what: failed with status $status; the whole log is $log"
    return "$status"
}
