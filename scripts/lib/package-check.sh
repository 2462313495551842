#!/usr/bin/env bash
# In a bare root of scripts/package: install the .deb of Debian $1, try it, purge it.
set -euxo pipefail
export PAGER=cat
# Without what others leave behind: systemd-analyze, and netbase of Debian 13 (/etc/hosts).
what_is_there() {
    dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' | grep -v '^rc' || :
    find / -xdev \( -path /project -o -path /dist -o -path /proc -o -path /sys -o -path /tmp \
        -o -path /run/systemd -o -path /etc/hosts -o -path /var/cache -o -path /var/lib/apt \
        -o -path /var/lib/dpkg -o -path /var/log \
        -o -name __pycache__ \) -prune -o -print
    find / -xdev -name '*btrfs*ublk*' ! -path '/dist/*' ! -path '/project/*'
}
refused() { # TEXT command…: it fails, and says so
    local text=$1 said
    shift
    if said=$("$@" 2>&1); then
        echo "'$*' is not refused" >&2
        return 1
    fi
    grep -qF -- "$text" <<<"$said" || { echo "$said" >&2 && return 1; }
}
get() {
    apt-get --yes --no-install-recommends -o APT::Update::Error-Mode=any "$@"
}

get update
what_is_there >/tmp/before
get install /dist/btrfs-ublk_*~deb"$1"u*.deb
cd /tmp # Python looks for modules here first

btrfs-ublk --version | tee versions
grep -E '^ *helpers +([0-9]+) of \1 of this version$' versions
# 3: a module of the kernel is missing here, which no package can bring.
status=0
btrfs-ublk doctor --all | tee doctor || status=$?
((status == 0 || status == 3))
grep -qE '^ *yes +make and check seeds' doctor

man -w btrfs-ublk btrfs-ublk-volume
# Wider than what it would keep in its cache.
MANWIDTH=100 man btrfs-ublk-volume | grep -qF 'btrfs-ublk volume up'
for unit in btrfs-ublk btrfs-ublk-volume; do
    systemd-analyze verify "$unit@one.service"
done
systemd-analyze verify btrfs-ublk.socket btrfs-ublk-snapshotter.service
bash -c '. /usr/share/bash-completion/completions/btrfs-ublk && complete -p btrfs-ublk'
python3 -c 'from importlib.metadata import entry_points as found, version
import btrfs_ublk
assert version("btrfs-ublk") == btrfs_ublk.__version__
(plugin,) = found(group="pytest11", name="btrfs_ublk")
(command,) = found(group="console_scripts", name="btrfs-ublk")
command.load()'
test -s /usr/share/doc/btrfs-ublk/README.md* && test -s /usr/share/doc/btrfs-ublk/copyright

btrfs-ublk seed create seed.img --virtual-data-size 1T --metadata-only
btrfs-ublk seed check seed.img
btrfs-ublk seed inspect --json seed.img >/dev/null
# Its modules are there, whatever it says of a machine without devices.
btrfs-ublk metrics >/dev/null
btrfs-ublk gc

mkdir -p /run/btrfs-ublk/devices/one
refused 'devices are up' get purge btrfs-ublk
rmdir /run/btrfs-ublk/devices/one
btrfs-ublk --version >/dev/null # it is still there
mkdir -p /var/lib/btrfs-ublk/volumes/mine
get purge btrfs-ublk
test -d /var/lib/btrfs-ublk/volumes/mine # what was written stays
rmdir -p --ignore-fail-on-non-empty /var/lib/btrfs-ublk/volumes/mine
# What came for it goes as well; what is only recommended or suggested by others, too.
get autoremove --purge -o APT::AutoRemove::RecommendsImportant=false \
    -o APT::AutoRemove::SuggestsImportant=false
what_is_there >/tmp/after
diff /tmp/before /tmp/after
