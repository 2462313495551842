"""QEMU's command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .kernel import Kernel
from .root_share import Share

QEMU = "qemu-system-x86_64"
QEMU_OF = {"amd64": QEMU, "arm64": "qemu-system-aarch64"}

# NB: string instructions cost one step per iteration under emulation; without these
# two the kernel copies by larger words, three to nine times as fast.
_TCG_CPU = "max,-erms,-fsrm"

# NB: QEMU 7.2 emulates cmpxchg16b wrongly when CPUs run in parallel: it leaves garbage
# in the flags.  SLUB of Linux 6.12 uses it, and one boot in five dies of that.
_TCG_PARALLEL_CPU = f"{_TCG_CPU},-cx16"

# NB: not max, which signs pointers: emulated, that takes half of the time.
_ARM64_CPU = "neoverse-n1"  # has pages of 16 KiB, which cortex-a57 has not


@dataclass(frozen=True, kw_only=True)
class Machine:
    kernel: Kernel
    initramfs: Path
    memory: str
    cpus: int
    kvm: bool
    icount: bool
    pmem: str | None = None  # so much of the memory is a persistent memory device
    console: Path  # output: the log of what the guest's kernel says


def qemu_argv(
    machine: Machine,
    *,
    shares: Sequence[Share] = (),
    ports: dict[str, int] | None = None,
) -> list[str]:
    """The command that boots `machine`.

    `ports` maps virtio port names to socket descriptors that QEMU inherits.
    """
    arch = machine.kernel.arch
    board = "q35" if arch == "amd64" else "virt"
    return [
        *(QEMU_OF[arch], "-no-user-config", "-nodefaults", "-no-reboot"),
        *("-display", "none", "-monitor", "none"),
        *("-machine", f"{board},memory-backend=ram"),
        # Shared, because virtiofsd reads and writes the guest's memory.
        *("-object", f"memory-backend-memfd,id=ram,size={machine.memory},share=on"),
        *("-m", machine.memory, "-kernel", str(machine.kernel.image)),
        *_cpu(machine),
        *("-initrd", str(machine.initramfs), "-append", _kernel_arguments(machine)),
        *("-chardev", f"file,id=console,path={_quoted(machine.console)}"),
        *("-serial", "chardev:console"),
        *(word for share in shares for word in _share(share)),
        *_ports(ports or {}),
    ]


def _cpu(machine: Machine) -> list[str]:
    arm64 = machine.kernel.arch == "arm64"
    if machine.icount:
        # One executed instruction is one nanosecond of guest time: figures repeat
        # to 0.1 %, whatever else the host does.
        # NB: not sleep=off, with which the clock leaps to the next timer when the CPU
        # is idle: a second passes in no time while a file is read from the host, and
        # every time limit with it.
        cpu = _ARM64_CPU if arm64 else _TCG_CPU
        return ["-accel", "tcg,thread=single", "-smp", "1", "-cpu", cpu] + [
            *("-icount", "shift=0,sleep=on")
        ]
    if machine.kvm:
        return ["-accel", "kvm", "-cpu", "host", "-smp", str(machine.cpus)]
    return [
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        _ARM64_CPU if arm64 else _TCG_PARALLEL_CPU,
        "-smp",
        str(machine.cpus),
    ]


# Below the hole for devices at 2 GiB, above what the kernel needs early.
_PMEM_START_GIB = 1


def _kernel_arguments(machine: Machine) -> str:
    pmem, arm64 = machine.pmem, machine.kernel.arch == "arm64"
    # NB: not a device of QEMU's, which takes memory that is plugged in later; a part of
    # memory that the kernel is told to treat so is as fast, and maps (DAX) as well.
    more = [f"memmap={pmem}!{_PMEM_START_GIB}G"] if pmem else []
    if arm64:
        more.append(
            "kpti=off"
        )  # else on, because of KASLR; each system call costs more
    return " ".join(
        (
            f"console={'ttyAMA0' if arm64 else 'ttyS0'}",
            "loglevel=5",  # warnings: a slow serial line is no place for more
            "panic=-1",  # at once, and -no-reboot turns it into an exit
            # A task that dies in the kernel leaves its locks held, and all that
            # follows hangs: better to die and say so.
            "oops=panic",
            "mitigations=off",
            "random.trust_cpu=on",
            "no_timer_check",  # emulated timers fail it now and then
            "raid=noautodetect",
            "fuse.enable_uring=1",  # where it can (6.14): a benchmark compares with it
            *more,
        )
    )


def _share(share: Share) -> list[str]:
    name = share.tag
    return [
        *("-chardev", f"socket,id={name},path={_quoted(share.socket_path)}"),
        *("-device", f"vhost-user-fs-pci,chardev={name},tag={name},queue-size=1024"),
    ]


def _ports(ports: dict[str, int]) -> list[str]:
    if not ports:
        return []
    words = ["-device", "virtio-serial-pci"]
    for name, fd in ports.items():
        words += ["-chardev", f"socket,id=port-{name},fd={fd}"]
        words += ["-device", f"virtserialport,chardev=port-{name},name={name}"]
    return words


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")
