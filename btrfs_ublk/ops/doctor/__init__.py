"""What this machine can do, what is missing, and the command to get it."""

from btrfs_ublk.ops.doctor.diagnosis import Ability, Diagnosis, Finding, diagnose

__all__ = ["Ability", "Diagnosis", "Finding", "diagnose"]
