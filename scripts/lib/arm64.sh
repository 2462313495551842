# shellcheck shell=bash
# A Debian of arm64, which scripts/vm --arch arm64 runs as a guest, and programs for it.
# Needs say.sh, packages.sh, and PROJECT.

# make_arm64_root ROOT: what is there stays, unless it was made of other packages.
make_arm64_root() {
    local root=$1 packages
    packages="$(packages_of_part build) $(packages_of_part demo)"
    packages+=" $(packages_of_part arm64-root)"
    if [ "$(cat "$root/etc/packages" 2>/dev/null)" = "$packages" ]; then
        return
    fi
    mkdir -p "${root%/*}"
    rm -rf --one-file-system "$root" "$root.new"
    # Only unpacked: no program of that architecture runs before there is a guest.
    run_logged "unpacking a Debian 13 of arm64" mmdebstrap --mode=root --arch=arm64 \
        --variant=extract --include="$packages" trixie "$root.new"
    # What the packages' own scripts would have done, as far as it is wanted.
    cp "$root.new/usr/share/base-passwd/passwd.master" "$root.new/etc/passwd"
    cp "$root.new/usr/share/base-passwd/group.master" "$root.new/etc/group"
    echo '127.0.0.1 localhost' >"$root.new/etc/hosts"
    cat "$root.new"/usr/share/ca-certificates/mozilla/*.crt \
        >"$root.new/etc/ssl/certs/ca-certificates.crt"
    ln -sf mawk "$root.new/usr/bin/awk"
    ln -sf gcc "$root.new/usr/bin/cc"
    mkdir -p "$root.new/root"
    echo "$packages" >"$root.new/etc/packages"
    mv "$root.new" "$root"
}

# compile_for_arm64 ROOT: programs and those of tests, optimised, to build/arm64.
# NB: not in the guest, where the compiler would be emulated.
compile_for_arm64() {
    local root=$1 build=$PROJECT/build/arm64
    local libraries=$root/usr/lib/aarch64-linux-gnu bin=$PROJECT/.venv/bin
    if [ ! -e "$build/build.ninja" ]; then
        mkdir -p "$build"
        cat >"$build.ini" <<EOF
[binaries]
c = ['aarch64-linux-gnu-gcc', '--sysroot=$root']
pkg-config = 'pkg-config'
[properties]
sys_root = '$root'
pkg_config_libdir = '$libraries/pkgconfig:$root/usr/share/pkgconfig'
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'aarch64'
endian = 'little'
EOF
        PATH=$bin:$PATH run_logged "preparing $build" \
            meson setup "$build" "$PROJECT" -Dtests=true --cross-file "$build.ini"
    fi
    PATH=$bin:$PATH run_logged "compiling for arm64" ninja -C "$build"
}
