"""The commands that leaks.py ends, what each needs, and how it is undone."""

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.images import tagged_image

from btrfs_ublk.device import show_device
from btrfs_ublk.kernel import mounted
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.temporary import tempdir

NAME = "one"

Words = tuple[object, ...]
Step = Words | Callable[[], object]


@dataclass(frozen=True)
class Scene:
    """A command, and what is done once before, after each time, and once at the end.
    ``unless`` is what a repeated command may say instead of doing all again.
    ``resumes``: what it has fetched or made stays, and the next one goes on with it.
    ``recover``: the next start of what it works on, which ends what was begun.
    ``collect``: this removes what it has fetched, which stays after a signal."""

    words: Words
    undo: Sequence[Step] = ()
    before: Sequence[Step] = ()
    end: Sequence[Step] = ()
    unless: str = "\0"
    resumes: bool = False
    recover: Sequence[Step] = ()
    collect: Sequence[Step] = ()


class Scenes:
    """All scenes of a campaign with this directory, and a registry (HOST:PORT) that
    keeps what it has in ``stored``. ``do`` does steps."""

    def __init__(
        self, top: Path, host: str, stored: Path, do: Callable[[Sequence[Step]], None]
    ) -> None:
        self._top, self._host, self._stored, self._do = top, host, stored, do
        self._work = top / "work"
        fuse = ("--front-end", "fuse", "--mount", top / "mnt", "--writable", "256M")
        self._create: Words = (
            *("volume", "up", NAME, *fuse, "--size", "1G"),
            *("--add-file", f"a={top}/content"),
        )
        self._image: Words = (
            *("volume", "up", NAME, *fuse),
            *("--image", f"{host}/app:1", "--image-insecure"),
        )
        self._up, self._down = ("volume", "up", NAME), ("volume", "down", NAME)
        self._remove: Words = ("volume", "remove", NAME, "--yes")
        self._gone: list[Step] = [self._down, self._remove]
        self._pull: Words = ("image", "pull", f"{host}/app:1", "--insecure")
        self._images = cache(self._make_images)
        self._cached = cache(self._fill_cache)
        (top / "tree").mkdir()
        (top / "tree/file").write_bytes(bytes(100_000))
        (top / "content").write_bytes(os.urandom(100_000))
        (top / "description").write_text(
            '{"version": 1, "size": 8192, "segments":'
            ' [{"kind": "pattern", "offset": 0, "length": 8192}]}'
        )
        self._work.mkdir()

    def all(self) -> dict[str, Scene]:
        return {
            **self._of_volumes(),
            **self._of_devices(),
            **self._of_images(),
            **self._of_forks(),
            **self._of_stores(),
            **self._of_containers(),
        }

    def _of_volumes(self) -> dict[str, Scene]:
        create, down, remove = self._create, self._down, self._remove
        plain = f"oci:{self._top}/plain:1"
        add_tree = ("volume", "add-tree", NAME, self._top / "tree", "sub")
        add_image = ("volume", "add-image", NAME, plain, "sub")
        again = [*self._gone, create]
        return {
            "volume up, new": Scene(create, self._gone),
            "volume up": Scene(self._up, [down], [create, down], [remove]),
            "volume down": Scene(down, [self._up], [create], self._gone),
            "volume remove": Scene(
                remove, [create, down], [create, down], [remove], "no volume"
            ),
            "volume up of an image": Scene(
                self._image,
                [*self._gone, ("image", "gc")],
                [self._images],
                collect=[("image", "gc")],
            ),
            "volume add-tree": Scene(
                add_tree, again, [create], self._gone, "there is a 'sub'"
            ),
            "volume add-image": Scene(
                add_image, again, [self._images, create], self._gone, "there is a 'sub'"
            ),
        }

    def _of_devices(self) -> dict[str, Scene]:
        add: Words = (
            *("device", "up", "d", self._top / "description"),
            *("--front-end", "fuse"),
        )
        down: Words = ("device", "down", "d")
        seed = self._work / "seed"

        def dead() -> None:
            self._do([add])
            state = show_device("d").state
            daemon, server = state.supervisor, state.server
            assert daemon is not None and server is not None
            os.kill(daemon.pid, signal.SIGSTOP)  # or it would start others
            for each in [*(x.process for x in state.keepers), server, daemon]:
                os.kill(each.pid, signal.SIGKILL)
                each.wait(timeout_s=10)

        left = self._leave_all
        create: Words = ("seed", "create", seed, "--virtual-data-size", "1G")
        return {
            "device up": Scene(add, [down], unless="exists already"),
            "device down": Scene(down, [add], [add], [down], "no device"),
            # What is left of them, the next one removes.
            "device gc": Scene(
                *(("device", "gc"), [dead], [dead], [("device", "gc")]), resumes=True
            ),
            "gc": Scene(*(("gc",), [left], [left], [("gc",)]), resumes=True),
            "seed create": Scene(create, [seed.unlink], unless="exists"),
        }

    def _of_images(self) -> dict[str, Scene]:
        host, ordinary = self._host, f"oci:{self._top}/ordinary:app"
        pushed = f"{host}/pushed:1"
        made, indexed = self._work / "built", self._work / "indexed"
        convert: Words = (
            *("image", "convert", f"{host}/ordinary:1", pushed),
            *("--work", self._work, "--insecure"),
        )
        push = ("image", "push", f"oci:{self._top}/image:1", pushed, "--insecure")
        return {
            "image build": Scene(
                ("image", "build", self._top / "tree", "-o", made, "--tag", "1"),
                [lambda: shutil.rmtree(made)],
                resumes=True,
            ),
            "image index": Scene(
                ("image", "index", ordinary, "-o", indexed, "--tag", "1"),
                [lambda: shutil.rmtree(indexed)],
                [self._images],
                resumes=True,
            ),
            "image push": Scene(push, [self._unpush], [self._images]),
            "image pull": Scene(self._pull, [("image", "gc")], [self._images]),
            "image gc": Scene(
                ("image", "gc"), [self._pull], [self._images, self._pull]
            ),
            "image convert": Scene(
                convert, [self._unpush], [self._images], resumes=True
            ),
        }

    def _of_forks(self) -> dict[str, Scene]:
        found = {}
        start: list[Step] = [self._images, self._image]
        end = [*self._gone, ("image", "gc")]
        for mode in ("overlay", "snapshot"):
            fork: Words = ("image", "fork", NAME, "f", "--mode", mode)
            unfork: Words = ("image", "unfork", NAME, "f", "--yes")
            again: Sequence[Step] = [self._up]
            found[f"image fork, {mode}"] = Scene(
                fork, [unfork], start, end, "already", recover=again
            )
            found[f"image unfork, {mode}"] = Scene(
                unfork, [fork], [*start, fork], end, "no fork", recover=again
            )
        delta = self._work / "delta"
        layout = self._work / "committed"
        start = [*start, fork, self._change_fork]
        commit: Words = ("image", "commit", NAME, "f")
        found["image commit"] = Scene(
            (*commit, "-t", f"oci:{layout}:1"),
            [lambda: shutil.rmtree(layout)],
            start,
            end,
            resumes=True,
        )
        found["image commit to a registry"] = Scene(
            (*commit, "-t", f"{self._host}/pushed:1"), [self._unpush], start, end
        )
        found["image commit --delta"] = Scene(
            (*commit, "--delta", delta), [delta.unlink], start, end, "exists"
        )
        found["image apply"] = Scene(
            ("image", "apply", NAME, delta, "g"),
            [("image", "unfork", NAME, "g", "--yes")],
            [*start, (*commit, "--delta", delta)],
            [*end, delta.unlink],
            "already",
            recover=[self._up],
        )
        found["image detach"] = Scene(
            ("image", "detach", NAME),
            [*self._gone, ("image", "gc"), self._image],
            [self._images, self._image],
            end,
            resumes=True,
        )
        return found

    def _of_stores(self) -> dict[str, Scene]:
        place, new = ("-d", self._top / "cache"), self._top / "new-cache"
        nginx = self._work / "nginx.conf"
        return {
            "cache limit": Scene(
                ("cache", "limit", "-d", new, "--max", "64M"),
                [lambda: shutil.rmtree(new)],
                resumes=True,
            ),
            "cache prune": Scene(
                ("cache", "prune", *place, "--to", "0"),
                [self._copy_cache],
                [self._images, self._cached, self._copy_cache],
                [self._drop_cache],
            ),
            "site-cache config": Scene(
                (
                    *("site-cache", "config", "--nodes", "127.0.0.1,127.0.0.2"),
                    *("--origin", "https://registry.example.org"),
                    *("--resolver", "127.0.0.1", "-o", nginx),
                ),
                [nginx.unlink],
            ),
        }

    def _of_containers(self) -> dict[str, Scene]:
        store = self._top / "podman"
        add: Words = ("podman", "add", NAME, "--store", store)
        drop: Words = ("podman", "remove", NAME, "--store", store)
        start: list[Step] = [self._images, self._image]

        def remove_store() -> None:
            shutil.rmtree(store)

        end: list[Step] = [*self._gone, ("image", "gc"), remove_store]
        return {
            "podman setup": Scene(
                ("podman", "setup", "--store", store), [remove_store], resumes=True
            ),
            "podman add": Scene(add, [drop], start, end, "already"),
            "podman remove": Scene(drop, [add], [*start, add], end, "no "),
        }

    # What scenes need.

    def _make_images(self) -> None:
        """Have images: in layouts, and in the registry."""
        host, top = self._host, self._top
        (top / "etc/images.toml").write_text(f'[[allow]]\nfrom = "{host}/*"\n')
        files = {"file": os.urandom(100_000), "etc/name": b"a name\n"}
        ordinary = tagged_image(top / "ordinary", files, {"etc/last": b"last\n"})
        image, plain = top / "image", top / "plain"
        build: Words = ("image", "build", ordinary, "--tag", "1")
        self._do(
            [
                (*build, "-o", image),
                (*build, "-o", plain, "--compression", "none"),
                ("image", "push", f"oci:{image}:1", f"{host}/app:1", "--insecure"),
                self._image,
                ("image", "fork", NAME, "f"),
                ("image", "commit", NAME, "f", "-t", f"{host}/ordinary:1"),
                *self._gone,
                ("image", "gc"),
            ]
        )

    def _unpush(self) -> None:
        shutil.rmtree(self._stored / "pushed")
        for path in self._work.glob("btrfs-ublk-convert-*"):
            shutil.rmtree(path)

    def _change_fork(self) -> None:
        fork = self._top / "mnt/forks/f"
        (fork / "etc/name").write_text("another\n")
        (fork / "new").write_bytes(bytes(10_000))

    def _fill_cache(self) -> None:
        """Have a cache with a blob of the registry in it."""
        blobs = self._stored.parent / "blobs/sha256"
        largest = max(blobs.glob("*/*/data"), key=lambda path: path.stat().st_size)
        url = f"http://{self._host}/v2/app/blobs/sha256:{largest.parent.name}"
        cached = self._top / "filled-cache"
        self._do(
            [
                (*self._create, "--add-file", f"b={url}", "--cache", cached),
                lambda: (self._top / "mnt/b").read_bytes(),
                *self._gone,
            ]
        )

    def _copy_cache(self) -> None:
        self._drop_cache()
        shutil.copytree(self._top / "filled-cache", self._top / "cache")

    def _drop_cache(self) -> None:
        shutil.rmtree(self._top / "cache", ignore_errors=True)

    def _leave_all(self) -> None:
        """Have a process that is killed while it has one of each."""
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException), ExitStack() as stack:
                own = stack.enter_context(tempdir(parent=self._work))
                (own / "file").write_bytes(bytes(1 << 20))
                stack.enter_context(loop_device(own / "file"))
                (own / "mnt").mkdir()
                stack.enter_context(mounted("none", own / "mnt", fs_type="tmpfs"))
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
