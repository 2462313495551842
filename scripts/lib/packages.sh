# shellcheck shell=bash
# Distribution packages.  The names are Debian's; fedora_name knows the others.
# Needs say.sh.

packages_of_part() { # build|demo|bench|test|package|vm|arm64|arm64-root
    case $1 in
    build)
        echo gcc libc6-dev pkg-config python3 python3-venv \
            liburing-dev libjansson-dev libfuse3-dev uuid-dev libisal-dev \
            libuv1-dev libssl-dev libsqlite3-dev libcurl4-openssl-dev \
            zlib1g-dev libzstd-dev libarchive-dev libxxhash-dev libb2-dev
        ;;
    demo)
        # The registry serves the image of the demo's second act.
        echo btrfs-progs kmod util-linux mount docker-registry
        ;;
    bench)
        # fio, and what only comparisons need: EROFS, xfs, ext4, other lazy mounts, pigz.
        echo fio erofs-utils xfsprogs e2fsprogs nbdkit libnbd-bin rclone fuse3 pigz
        ;;
    test)
        # nginx: a real server that data are fetched from; skopeo: a client of registries
        # that is not ours; what shows man pages; containerd, runc and podman, which run
        # containers on our snapshots and images, and what runs in them; strace fails
        # system calls of helpers; clang, for libFuzzer; the last line: web servers that
        # tests/system/peers asks
        echo clang "$(libfuzzer_package)" clang-format clang-tidy shellcheck systemd nginx skopeo \
            groff-base mandoc zstd xz-utils \
            containerd runc podman conmon busybox-static strace \
            apache2-bin h2o lighttpd ruby ruby-webrick squid varnish webfs
        ;;
    package) echo mmdebstrap ;;
    vm)
        echo qemu-system-x86 busybox-static kmod xz-utils zstd "$(virtiofsd_package)"
        ;;
    arm64) echo qemu-system-arm gcc-aarch64-linux-gnu mmdebstrap ;;
    arm64-root)
        # For the guest, beside the parts build and demo: Python packages, which pip brings
        # here, and what most of the tests need.
        echo '?essential' busybox-static ca-certificates mawk meson ninja-build fuse3 \
            procps iproute2 attr e2fsprogs strace fio zstd xz-utils pigz \
            python3-{boto3,click,cryptography,grpcio,prometheus-client,protobuf,psutil} \
            python3-{requests,rich,yaml,zstandard} \
            python3-{hypothesis,pyroute2,pytest,pytest-timeout,pytest-xdist,trustme}
        ;;
    esac
}

virtiofsd_package() {
    # Debian 12 has the C one inside QEMU's package, later releases the Rust one.
    case $(. /etc/os-release && echo "${VERSION_CODENAME:-}") in
    bookworm) echo qemu-system-common ;;
    *) echo virtiofsd ;;
    esac
}

libfuzzer_package() {
    # It belongs to one version of clang; before Debian 12 it was in clang itself.
    local version
    version=$(apt-cache depends clang 2>/dev/null | grep -o 'clang-[0-9]*' | head -n1) || :
    echo "lib${version:-clang-14}" | sed 's/clang-\(.*\)/clang-rt-\1-dev/'
}

fedora_name() {
    case $1 in
    libc6-dev) echo glibc-devel ;;
    pkg-config) echo pkgconf-pkg-config ;;
    python3-venv) echo python3-libs ;;
    liburing-dev) echo liburing-devel ;;
    libjansson-dev) echo jansson-devel ;;
    libfuse3-dev) echo fuse3-devel ;;
    uuid-dev) echo libuuid-devel ;;
    libisal-dev) echo isa-l-devel ;;
    libuv1-dev) echo libuv-devel ;;
    libssl-dev) echo openssl-devel ;;
    libarchive-dev) echo libarchive-devel ;;
    libb2-dev) echo libb2-devel ;;
    libxxhash-dev) echo xxhash-devel ;;
    libcurl4-openssl-dev) echo libcurl-devel ;;
    libsqlite3-dev) echo sqlite-devel ;;
    zlib1g-dev) echo zlib-devel ;;
    libzstd-dev) echo libzstd-devel ;;
    docker-registry) echo docker-distribution ;;
    mount) echo util-linux-core ;;
    clang-format | clang-tidy) echo clang-tools-extra ;;
    libclang-rt-*) echo compiler-rt ;;
    shellcheck) echo ShellCheck ;;
    qemu-system-x86) echo qemu-system-x86-core ;;
    busybox-static) echo busybox ;;
    xz-utils) echo xz ;;
    *) echo "$1" ;;
    esac
}

# install_packages PART…: make sure that the packages of the parts are there.
install_packages() {
    local part wanted=() missing=()
    for part in "$@"; do
        read -ra names <<<"$(packages_of_part "$part")"
        wanted+=("${names[@]}")
    done
    if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
        mapfile -t missing < <(missing_debian "${wanted[@]}")
        if ((${#missing[@]})); then
            install_debian "${missing[@]}"
        fi
    elif command -v rpm >/dev/null; then
        mapfile -t missing < <(missing_fedora "${wanted[@]}")
        if ((${#missing[@]})); then
            die "packages are missing; install them, then run this again:" \
                $'\n    sudo dnf install' "${missing[*]}"
        fi
    else
        say "neither apt-get nor rpm here, so packages are not checked; needed" \
            "are what Debian calls: ${wanted[*]}"
    fi
}

missing_debian() {
    local installed package
    # NB: ${db:Status-Status}, because dpkg also knows packages that were removed.
    installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null |
        sed -n 's/^installed //p') || :
    for package in "$@"; do
        grep -qxF -e "$package" <<<"$installed" || echo "$package"
    done | sort -u
}

missing_fedora() {
    local package
    for package in "$@"; do
        package=$(fedora_name "$package")
        rpm --quiet -q "$package" || echo "$package"
    done | sort -u
}

install_debian() {
    local command="apt-get install --no-install-recommends $*"
    if [ "$(id -u)" != 0 ]; then
        die "packages are missing and only root can install them:" \
            $'\n    sudo' "$command"
    fi
    # The lists of a fresh system are empty, those of an old one name what is gone.
    if apt_quietly install --simulate "$@" >/dev/null 2>&1 &&
        run_logged "installing $*" apt_without_services install "$@"; then
        return
    fi
    run_logged "reading the package lists" apt_quietly update ||
        die "the package lists cannot be read (no network?); needed:" \
            $'\n   ' "$command"
    run_logged "installing $*" apt_without_services install "$@" ||
        die "these packages could not be installed:" $'\n   ' "$command"
}

# Servers that tests start themselves must not run by themselves. Debian asks this file
# before it starts what it has installed (invoke-rc.d(8)); and they would start at boot.
policy=/usr/sbin/policy-rc.d

apt_without_services() {
    local status=0 package
    if [ -e "$policy" ]; then
        apt_quietly "$@" || status=$?
    else
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        apt_quietly "$@" || status=$?
        rm "$policy"
    fi
    for package in "$@"; do
        case $package in
        nginx | docker-registry | containerd | h2o | lighttpd | squid | varnish | webfs)
            # Without systemd, or already so: nothing to do.
            systemctl --quiet disable "$package" >/dev/null 2>&1 || :
            ;;
        podman)
            systemctl --quiet disable podman.socket podman.service \
                podman-restart.service podman-auto-update.service \
                podman-auto-update.timer >/dev/null 2>&1 || :
            ;;
        esac
    done
    return "$status"
}

apt_quietly() {
    DEBIAN_FRONTEND=noninteractive apt-get --yes --no-install-recommends \
        -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any \
        -o Acquire::Retries=3 "$@"
}
