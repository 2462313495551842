#!/usr/bin/env bash
# In an eStargz image two files with Latin-1 names are one file, and a hard link to the first has
# the content of the second.
#
# Version: github.com/containerd/stargz-snapshotter/estargz 0.18.2 (Go module), with which
# stargz-snapshotter, nerdctl and BuildKit convert. GNU tar 1.34 writes the layer and reads it.
# Why it surprises: names of files are bytes, tar keeps them, and an eStargz layer is still that
# tar: unpacked, it is right. But lazy mounts take names from the table of contents, which is JSON,
# and Go's encoder writes U+FFFD for each byte that is not UTF-8, without an error. So caf\xe8 and
# caf\xe9 become one name, the later one wins, and the content of the first is gone, also under
# another name that was linked to it. One image has two trees: what a container sees depends on
# whether its node has pulled the layer or mounted it.
# Source: estargz/types.go: Name and LinkName of TOCEntry are strings in JSON (Xattrs are []byte,
# thus base64, and arrive whole). encoding/json, Marshal: invalid bytes of strings are replaced.
#
# Output seen:
#   unpacked: caf\xe9=nine, caf\xe8=eight, link=nine
#   lazy: caf\xe9 is not there, caf\xe8 is not there, link=eight
#   lazy: caf\ufffd=eight
#
# With Go, GNU tar, and a network for Go modules. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod GOPATH=$work/go GOTOOLCHAIN=local

mkdir tree unpacked module
first=$'caf\xe9' second=$'caf\xe8'
printf nine >"tree/$first"
printf eight >"tree/$second"
ln "tree/$first" tree/link
tar -C tree -cf layer.tar "$first" "$second" link

cat >module/go.mod <<'MOD'
module lazy
go 1.25.0
require github.com/containerd/stargz-snapshotter/estargz v0.18.2
MOD
cat >module/main.go <<'GO'
// Make layer.tar an eStargz layer, and read files of it as lazy mounts find them.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/containerd/stargz-snapshotter/estargz"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func whole(file *os.File) *io.SectionReader {
	return io.NewSectionReader(file, 0, must(file.Stat()).Size())
}

func main() {
	blob := must(estargz.Build(whole(must(os.Open("layer.tar")))))
	layer := must(os.Create("layer.tar.gz"))
	must(io.Copy(layer, blob))
	reader := must(estargz.Open(whole(layer)))
	say := func(names ...string) {
		fmt.Print("lazy:")
		for at, name := range names {
			if at > 0 {
				fmt.Print(",")
			}
			shown := fmt.Sprintf("%+q", name)
			shown = shown[1 : len(shown)-1]
			if _, found := reader.Lookup(name); found {
				content := must(io.ReadAll(must(reader.OpenFile(name))))
				fmt.Printf(" %s=%s", shown, content)
			} else {
				fmt.Printf(" %s is not there", shown)
			}
		}
		fmt.Println()
	}
	say("caf\xe9", "caf\xe8", "link")
	say("caf\ufffd")
}
GO
go -C module mod tidy 2>errors || { cat errors; exit 1; }
timeout 500 go -C module build -o ../lazy .
./lazy >lazily
tar -C unpacked -xf layer.tar.gz
cd unpacked
{
    printf "unpacked: caf%sxe9=%s, caf%sxe8=%s, link=%s\n" \\ "$(cat "$first")" \\ "$(cat "$second")" "$(cat link)"
    cat ../lazily
} | tee ../seen
cat >../wanted <<'TEXT'
unpacked: caf\xe9=nine, caf\xe8=eight, link=nine
lazy: caf\xe9 is not there, caf\xe8 is not there, link=eight
lazy: caf\ufffd=eight
TEXT
diff ../wanted ../seen
