# shellcheck shell=bash
# Whether the running kernel has ublk.

running_kernel_has_ublk() {
    [ -e /dev/ublk-control ] ||
        { [ "$(id -u)" = 0 ] && modprobe --quiet ublk_drv 2>/dev/null &&
            [ -e /dev/ublk-control ]; }
}
