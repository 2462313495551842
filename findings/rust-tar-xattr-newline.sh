#!/usr/bin/env bash
# Rust's tar crate loses a program's capabilities where one of their bytes is 0x0a.
#
# Versions: the crate tar 0.4.44, unchanged in 0.4.45 and its main branch; archives of
# GNU tar 1.34 with --xattrs (Debian 12).
# Why it surprises: a pax record says its own length, and so GNU tar, libarchive and Go
# read values that hold a newline. The tar crate splits at newlines first. A value with
# one is then two records that are "malformed", and unpack() passes over those: it says
# Ok, the file is there, the attribute is not. Capabilities are a bit mask, thus a matter
# of luck: cap_net_bind_service (bit 10) arrives, cap_dac_override with cap_fowner (bits 1
# and 3, so 0x0a) does not. Tests with the one say nothing about the other.
# Source: tar-rs, src/pax.rs: PaxExtensions::new() splits the data at each newline and
# next() compares the length of the record with that of the line. src/entry.rs:
# set_xattrs() keeps of these items only those that are Ok.
#
# Output seen:
#   cap_net_bind_service: unpack Ok(()), same capabilities: yes
#   cap_dac_override,cap_fowner: unpack Ok(()), same capabilities: no (none)
#
# As root, with Rust and a network for apt and cargo. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download libcap2-bin=1:2.66-4+deb12u3+b1 libcap2=1:2.66-4+deb12u3+b1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/lib/x86_64-linux-gnu

mkdir -p crate/src
cat >crate/Cargo.toml <<'END'
[package]
name = "unpack"
version = "0.0.0"
edition = "2021"
[dependencies]
tar = { version = "=0.4.44", features = ["xattr"] }
END
cat >crate/src/main.rs <<'END'
fn main() {
    let file = std::fs::File::open("archive.tar").unwrap();
    let mut archive = tar::Archive::new(file);
    archive.set_unpack_xattrs(true);
    println!("{:?}", archive.unpack(std::env::args().nth(1).unwrap()));
}
END
timeout 500 cargo build --quiet --manifest-path crate/Cargo.toml

for capabilities in cap_net_bind_service cap_dac_override,cap_fowner; do
    echo text >program
    root/sbin/setcap "$capabilities+ep" program
    tar --xattrs --xattrs-include='*' -cf archive.tar program
    rm -rf gnu rust && mkdir gnu rust
    tar --xattrs --xattrs-include='*' -xf archive.tar -C gnu
    said=$(timeout 60 crate/target/debug/unpack rust)
    [ -f rust/program ]
    wanted=$(root/sbin/getcap gnu/program | cut -d ' ' -f 2)
    got=$(root/sbin/getcap rust/program | cut -d ' ' -f 2)
    same="yes"
    if [ "$got" != "$wanted" ]; then same="no (${got:-none})"; fi
    echo "$capabilities: unpack $said, same capabilities: $same" | tee -a seen
done
cat >wanted <<'END'
cap_net_bind_service: unpack Ok(()), same capabilities: yes
cap_dac_override,cap_fowner: unpack Ok(()), same capabilities: no (none)
END
diff wanted seen
