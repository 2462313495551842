"""What scripts/vm is made of; standard library only, as it runs before any set-up.

debian_kernel <- kernel: which kernel boots.  initramfs: how it finds its root.
root_share: the host's files.  accel <- machine: QEMU.  session: one run of a command.
"""
