"""The host's one daemon, which supervises all devices (docs/design/devices.md)."""
