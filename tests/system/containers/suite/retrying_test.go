package suite

import (
	"context"
	"sync/atomic"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// retrying repeats a call whose server was killed before it answered. What asks for a change may
// have changed it then: so the next answer, that a snapshot exists already or does not exist, is
// taken for success, where it did not, or did, before the first call.
type retrying struct{ snapshots.Snapshotter }

var repeated, done atomic.Int64

// repeat returns whether it was called more than once.
func repeat(call func() error) (again bool, err error) {
	for {
		if err = call(); !errdefs.IsUnavailable(err) {
			return again, err
		}
		again = true
		repeated.Add(1)
	}
}

func (r retrying) exists(ctx context.Context, key string) bool {
	_, err := r.Stat(ctx, key)
	return err == nil
}

func (r retrying) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	repeat(func() error { info, err = r.Snapshotter.Stat(ctx, key); return err })
	return info, err
}

func (r retrying) Update(ctx context.Context, info snapshots.Info, paths ...string) (now snapshots.Info, err error) {
	repeat(func() error { now, err = r.Snapshotter.Update(ctx, info, paths...); return err })
	return now, err
}

func (r retrying) Usage(ctx context.Context, key string) (usage snapshots.Usage, err error) {
	repeat(func() error { usage, err = r.Snapshotter.Usage(ctx, key); return err })
	return usage, err
}

func (r retrying) Mounts(ctx context.Context, key string) (mounts []mount.Mount, err error) {
	repeat(func() error { mounts, err = r.Snapshotter.Mounts(ctx, key); return err })
	return mounts, err
}

func (r retrying) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	var found []snapshots.Info
	_, err := repeat(func() error {
		found = nil
		return r.Snapshotter.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			found = append(found, info)
			return nil
		}, filters...)
	})
	for _, info := range found {
		if err == nil {
			err = fn(ctx, info)
		}
	}
	return err
}

type makeCall func(context.Context, string, string, ...snapshots.Opt) ([]mount.Mount, error)

func (r retrying) make(ctx context.Context, call makeCall, key, parent string, opts []snapshots.Opt) (mounts []mount.Mount, err error) {
	before := r.exists(ctx, key)
	again, _ := repeat(func() error { mounts, err = call(ctx, key, parent, opts...); return err })
	if again && !before && errdefs.IsAlreadyExists(err) {
		done.Add(1)
		return r.Mounts(ctx, key)
	}
	return mounts, err
}

func (r retrying) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return r.make(ctx, r.Snapshotter.Prepare, key, parent, opts)
}

func (r retrying) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return r.make(ctx, r.Snapshotter.View, key, parent, opts)
}

func (r retrying) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	before := r.exists(ctx, name) || !r.exists(ctx, key)
	again, err := repeat(func() error { return r.Snapshotter.Commit(ctx, name, key, opts...) })
	if again && !before && r.exists(ctx, name) && !r.exists(ctx, key) {
		done.Add(1)
		return nil
	}
	return err
}

func (r retrying) Remove(ctx context.Context, key string) error {
	before := r.exists(ctx, key)
	again, err := repeat(func() error { return r.Snapshotter.Remove(ctx, key) })
	if again && before && errdefs.IsNotFound(err) {
		done.Add(1)
		return nil
	}
	return err
}
