"""Watching running devices: metrics for Prometheus, and a live table."""

from btrfs_ublk.ops.monitor.exporter import serve_metrics
from btrfs_ublk.ops.monitor.metrics import metrics_text

__all__ = ["metrics_text", "serve_metrics"]
