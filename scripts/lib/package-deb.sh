#!/usr/bin/env bash
# In a root of scripts/package: make a .deb of /project for Debian $1, in /dist.
set -euxo pipefail
cd /project
cp -r packaging/debian debian
# One for each release: it is linked with that one's libraries.
sed -i "1s/)/~deb${1}u1)/" debian/changelog
DEB_BUILD_OPTIONS="noautodbgsym parallel=$(nproc)" dpkg-buildpackage --build=binary \
    --unsigned-changes --no-check-builddeps
lintian --allow-root --info --fail-on=error,warning ../btrfs-ublk_*.deb
dpkg-deb --info ../btrfs-ublk_*.deb
dpkg-deb --contents ../btrfs-ublk_*.deb
mv ../btrfs-ublk_*.deb /dist/
