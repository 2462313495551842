# shellcheck shell=bash
# Whether the running kernel has ublk, and why no VM can have another one.

running_kernel_has_ublk() {
    [ -e /dev/ublk-control ] ||
        { [ "$(id -u)" = 0 ] && modprobe --quiet ublk_drv 2>/dev/null &&
            [ -e /dev/ublk-control ]; }
}

# why_no_vm [KERNEL]: print why scripts/vm cannot work here; nothing when it can.
why_no_vm() {
    local kernel=${1:-latest}
    if [ "$(uname -m)" != x86_64 ]; then
        echo "no VM on $(uname -m) yet, only on x86_64"
    elif [ "$(id -u)" != 0 ]; then
        echo "only root can share / with a VM"
    else
        case $kernel in
        host | */*) ;; # no package
        *)
            if ! can_fetch_kernels && [ ! -d "$(kernel_cache)/$kernel" ]; then
                echo "kernels by name are Debian packages and need apt;" \
                    "--kernel host and --kernel PATH do not"
            fi
            ;;
        esac
    fi
}

can_fetch_kernels() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null
}

kernel_cache() {
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/btrfs-ublk/kernels"
}
