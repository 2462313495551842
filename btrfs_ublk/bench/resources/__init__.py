"""Resources for benchmarks: kernel modules, others' servers."""
