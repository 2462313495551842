# shellcheck shell=bash
# What the running kernel has, and why no VM can have another one.

running_kernel_has_ublk() {
    has_device ublk-control ublk_drv
}

# All that the front end fuse and a sprout on it take.
running_kernel_has_fuse() {
    has_device fuse fuse && has_device loop-control loop && has_device btrfs-control btrfs
}

# has_device NAME MODULE: /dev/NAME is there, or comes with the module.
has_device() {
    [ -e "/dev/$1" ] ||
        { [ "$(id -u)" = 0 ] && modprobe --quiet "$2" 2>/dev/null && [ -e "/dev/$1" ]; }
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
