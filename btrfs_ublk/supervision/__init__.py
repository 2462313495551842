"""Supervise devices: the host's daemon, its supervisors and keepers, and who asks."""
