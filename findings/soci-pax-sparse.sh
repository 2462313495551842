#!/usr/bin/env bash
# A sparse file in a layer has other content when SOCI mounts the layer lazily; and where another
# file follows it, SOCI writes an index that it cannot read.
#
# Version: github.com/awslabs/soci-snapshotter/ztoc 0.16.1 (Go module); layers of GNU tar 1.34.
# Why it surprises: SOCI leaves layers as they are, and verifies each span of them. With
# --format=posix a sparse member counts as an ordinary file, so no step complains. But the index has
# its length with the holes beside its place without them. Read by that, the file begins with the
# data that should follow the first hole, and ends with whatever comes after it in the layer; the
# length is right, and so are the digests, as they are about compressed bytes. If a file follows, the
# index says that the two overlap: building and marshalling succeed, only unmarshalling fails, so it
# shows on the nodes. In GNU's own format, the default, such a layer gets no index, with an error.
# Source: ztoc/toc_builder.go, metadataFromTarReader(): UncompressedSize is hdr.Size of Go's
# archive/tar, which is the logical size of a sparse file. ztoc/ztoc_marshaler.go, flatbufferToTOC():
# a member may not begin before the end of the one before it.
#
# Output seen:
#   posix, sparse file last: read 8192 bytes, "data" at 0
#   posix, sparse file first: read back: invalid toc entry
#   gnu, sparse file last: build: unsupported input tar entry 'S'
#   tar: read 8192 bytes, "data" at 4096
#
# With Go, a C compiler, zlib's headers, GNU tar, and a network for Go modules. It fails when that
# has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod GOPATH=$work/go GOTOOLCHAIN=local

mkdir tree unpacked module
truncate -s 8K tree/sparse
printf data | dd of=tree/sparse bs=4K seek=1 conv=notrunc status=none
echo text >tree/text

cat >module/go.mod <<'MOD'
module index
go 1.25.0
require github.com/awslabs/soci-snapshotter v0.16.1
MOD
cat >module/main.go <<'GO'
// Index a layer, store the index and load it, and read the sparse file by it.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/awslabs/soci-snapshotter/ztoc"
)

func fail(step string, err error) {
	if err != nil {
		fmt.Printf("%s: %v\n", step, err)
		os.Exit(0)
	}
}

func main() {
	index, err := ztoc.NewBuilder("test").BuildZtoc(os.Args[1], 1<<22)
	fail("build", err)
	stored, _, err := ztoc.Marshal(index)
	fail("marshal", err)
	index, err = ztoc.Unmarshal(stored)
	fail("read back", err)
	layer, err := os.ReadFile(os.Args[1])
	fail("open", err)
	section := io.NewSectionReader(bytes.NewReader(layer), 0, int64(len(layer)))
	content, err := index.ExtractFile(section, "sparse")
	fail("read", err)
	fmt.Printf("read %d bytes, \"data\" at %d\n", len(content), bytes.Index(content, []byte("data")))
}
GO
go -C module mod tidy 2>errors || { cat errors; exit 1; }
timeout 550 go -C module build -o ../index .

layer() {
    local format=$1
    shift
    tar -C tree --sparse --format="$format" -czf layer.tar.gz "$@"
}
{
    layer posix text sparse
    echo "posix, sparse file last: $(./index layer.tar.gz)"
    tar -C unpacked -xf layer.tar.gz
    layer posix sparse text
    echo "posix, sparse file first: $(./index layer.tar.gz)"
    layer gnu text sparse
    echo "gnu, sparse file last: $(./index layer.tar.gz)"
    at=$(grep -abo data unpacked/sparse | cut -d : -f 1)
    echo "tar: read $(stat -c %s unpacked/sparse) bytes, \"data\" at $at"
} | tee seen
cat >wanted <<'TEXT'
posix, sparse file last: read 8192 bytes, "data" at 0
posix, sparse file first: read back: invalid toc entry
gnu, sparse file last: build: unsupported input tar entry 'S'
tar: read 8192 bytes, "data" at 4096
TEXT
diff wanted seen
