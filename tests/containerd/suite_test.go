// containerd's own tests of snapshotters, run against `btrfs-ublk snapshotter serve`.
package suite

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

var (
	command = flag.String("command", "btrfs-ublk", "the command to test")
	base    = flag.String("base", "", "a directory on a btrfs")
)

// start serves a new directory below `base`, and returns a client of it.
func start(ctx context.Context, _ string) (snapshots.Snapshotter, func() error, error) {
	directory, err := os.MkdirTemp(*base, "s")
	if err != nil {
		return nil, nil, err
	}
	socket := filepath.Join(directory, "socket")
	server := exec.Command(*command, "snapshotter", "serve", "--root", directory, "--socket", socket)
	server.Stderr = os.Stderr
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return nil, nil, fmt.Errorf("%s does not serve %s", *command, socket)
		}
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	stop := func() error {
		connection.Close()
		if err := server.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		server.Wait() // It ends with 128 + 15.
		return nil
	}
	return proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "btrfs-ublk"), stop, nil
}

func TestSnapshotter(t *testing.T) {
	testsuite.SnapshotterSuite(t, "btrfs-ublk", start)
}
