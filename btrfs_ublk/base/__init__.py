"""The lowest layer: processes, signals, files, messages."""
