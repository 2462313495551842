// containerd's own tests of snapshotters, run against `btrfs-ublk snapshotter serve`. With
// -kills, it is killed and started again all the time, while the tests go on. That goes by calls,
// not by time: however long a restart takes, each server gets something done.
package suite

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

var (
	command = flag.String("command", "btrfs-ublk", "the command to test")
	base    = flag.String("base", "", "a directory on a btrfs")
	kills   = flag.Int("kills", 0, "kill a server after that many calls at most; 0: never")
)

// A server is killed so long at most after a call was sent.
const lateness = 50 * time.Millisecond

var killed atomic.Int64

// launch starts a server, and returns it when it accepts connections.
func launch(directory, socket string) (*exec.Cmd, error) {
	server := exec.Command(*command, "snapshotter", "serve", "--root", directory, "--socket", socket)
	server.Stderr = os.Stderr
	if err := server.Start(); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		connection, err := net.Dial("unix", socket)
		if err == nil {
			connection.Close()
			return server, nil
		}
		if time.Now().After(deadline) {
			server.Process.Kill()
			server.Wait()
			return nil, fmt.Errorf("%s does not serve %s: %w", *command, socket, err)
		}
	}
}

// serve serves until `over` is closed, by one server after the other. Calls are told to `called`.
func serve(server *exec.Cmd, directory, socket string, called, over <-chan struct{}) (err error) {
	for err == nil {
		for left := 1 + rand.N(max(*kills, 1)); *kills == 0 || left > 0; left-- {
			select {
			case <-over:
				err = server.Process.Signal(syscall.SIGTERM)
				server.Wait() // It ends with 128 + 15.
				return err
			case <-called:
			}
		}
		time.Sleep(rand.N(lateness))
		server.Process.Kill()
		server.Wait()
		killed.Add(1)
		server, err = launch(directory, socket)
	}
	fmt.Fprintln(os.Stderr, err) // Calls wait until the time for all tests is over.
	<-over
	return err
}

// start serves a new directory below `base`, and returns a client of it.
func start(ctx context.Context, _ string) (snapshots.Snapshotter, func() error, error) {
	directory, err := os.MkdirTemp(*base, "s")
	if err != nil {
		return nil, nil, err
	}
	socket := filepath.Join(directory, "socket")
	server, err := launch(directory, socket)
	if err != nil {
		return nil, nil, err
	}
	called, over, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() { ended <- serve(server, directory, socket, called, over) }()
	tell := func(ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		select {
		case called <- struct{}{}:
		default: // It is being killed, or started.
		}
		return invoke(ctx, method, request, reply, connection, options...)
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), grpc.WithUnaryInterceptor(tell),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
			BaseDelay: 10 * time.Millisecond, Multiplier: 1, MaxDelay: 10 * time.Millisecond}}))
	if err != nil {
		return nil, nil, err
	}
	stop := func() error {
		connection.Close()
		close(over)
		return <-ended
	}
	client := proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "btrfs-ublk")
	return retrying{client}, stop, nil
}

func TestSnapshotter(t *testing.T) {
	t.Cleanup(func() { // All have ended then, as some run beside others.
		if *kills > 0 {
			fmt.Printf("%d kills, %d calls repeated, %d of them done already\n", killed.Load(), repeated.Load(), done.Load())
		}
	})
	testsuite.SnapshotterSuite(t, "btrfs-ublk", start)
}
