#!/usr/bin/env bash
# In a root of scripts/package: make an .rpm of /project, in /dist.
set -euxo pipefail
cd /project
spec=packaging/btrfs-ublk.spec
version=$(sed -n 's/^Version: *//p' $spec)
sources=$(rpm --eval '%{_sourcedir}')
mkdir -p "$sources"
tar --create --gzip --file="$sources/btrfs-ublk-$version.tar.gz" \
    --transform="s,^\.,btrfs-ublk-$version," .
# What is required to build has other names here.
rpmbuild -bb --nodeps $spec
made=$(ls "$(rpm --eval '%{_rpmdir}')"/*/btrfs-ublk-*.rpm)
rpm --query --package --info --requires --list "$made"
root=$(mktemp -d)
rpm --root="$root" --dbpath=/rpm --install --nodeps --noscripts "$made"
PYTHONPATH=$(echo "$root"/usr/lib*/python3*/*-packages) "$root/usr/bin/btrfs-ublk" --version |
    grep -E '^ *helpers +([0-9]+) of \1 of this version$'
rm -r "$root"
mv "$made" /dist/
