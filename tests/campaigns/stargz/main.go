// Runs the library of stargz-snapshotter, as its own commands do, whose module the proxy of Go
// modules does not have: tests/campaigns/container_speed.py compares with it.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/containerd/stargz-snapshotter/service"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
)

// serve ROOT SOCKET [passthrough] is containerd-stargz-grpc with an empty configuration file, or
// with FUSE passthrough.
func serve(root, socket string, more ...string) error {
	var config service.Config
	config.Direct = true
	config.MergeBufferSize = 419430400
	config.MergeWorkerCount = 10
	config.PassThrough = len(more) > 0
	snapshotter, err := service.NewStargzSnapshotterService(context.Background(), root, &config)
	if err != nil {
		return err
	}
	defer snapshotter.Close()
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	stopped := make(chan os.Signal, 1)
	signal.Notify(stopped, unix.SIGTERM, unix.SIGINT)
	go func() { <-stopped; server.Stop() }()
	return server.Serve(listener)
}

// record ROOT COMMAND... runs a command in a root, which is a mount, and prints the files that it
// opens, in that order, as `ctr-remote image optimize` finds them.
func record(root string, command ...string) error {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_UNLIMITED_QUEUE, unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("fanotify_init: %w", err)
	}
	mask := uint64(unix.FAN_ACCESS | unix.FAN_OPEN)
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, mask, unix.AT_FDCWD, root); err != nil {
		return fmt.Errorf("fanotify_mark: %w", err)
	}
	run := exec.Command(command[0], command[1:]...)
	run.Stdout, run.Stderr, run.Dir = os.Stderr, os.Stderr, "/"
	run.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if err := run.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- run.Wait() }()
	seen := map[string]bool{}
	data := make([]byte, 64<<10)
	for ended, result := false, error(nil); ; {
		waiting := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if ready, _ := unix.Poll(waiting, 10); ready <= 0 {
			if ended {
				return result
			}
			select {
			case result = <-done:
				ended = true
			default:
			}
			continue
		}
		size, err := unix.Read(fd, data)
		if err != nil {
			return err
		}
		for in := bytes.NewReader(data[:size]); in.Len() > 0; {
			var event unix.FanotifyEventMetadata
			if err := binary.Read(in, binary.LittleEndian, &event); err != nil {
				return err
			}
			path, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", event.Fd))
			var about unix.Stat_t
			err := unix.Fstat(int(event.Fd), &about)
			unix.Close(int(event.Fd))
			name, isIn := strings.CutPrefix(path, root+"/")
			if isIn && err == nil && about.Mode&unix.S_IFMT == unix.S_IFREG && !seen[name] {
				seen[name] = true
				fmt.Println(name)
			}
		}
	}
}

// convert LAYER MADE makes an eStargz layer, where the files that standard input names come first,
// and prints what an image says of it.
func convert(layer, made string) error {
	names, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	source, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer source.Close()
	about, err := source.Stat()
	if err != nil {
		return err
	}
	var missed []string // what the command has made itself
	blob, err := estargz.Build(io.NewSectionReader(source, 0, about.Size()),
		estargz.WithPrioritizedFiles(strings.Split(string(names), "\n")), estargz.WithAllowPrioritizeNotFound(&missed))
	if err != nil {
		return err
	}
	defer blob.Close()
	target, err := os.Create(made)
	if err != nil {
		return err
	}
	defer target.Close()
	if _, err := io.Copy(target, blob); err != nil {
		return err
	}
	if err := blob.Close(); err != nil {
		return err
	}
	size, err := blob.UncompressedSize()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"diff_id": blob.DiffID().String(),
		"annotations": map[string]string{
			estargz.TOCJSONDigestAnnotation:         blob.TOCDigest().String(),
			estargz.StoreUncompressedSizeAnnotation: fmt.Sprint(size),
		},
	})
}

func main() {
	err := errors.New("usage: serve ROOT SOCKET [passthrough] | record ROOT COMMAND... | convert LAYER MADE")
	if len(os.Args) > 3 {
		switch words := os.Args[2:]; os.Args[1] {
		case "serve":
			err = serve(words[0], words[1], words[2:]...)
		case "record":
			err = record(words[0], words[1:]...)
		case "convert":
			err = convert(words[0], words[1])
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stargz:", err)
		os.Exit(1)
	}
}
