"""Resources for benchmarks: kernel modules and disks, others' servers, cgroups."""
