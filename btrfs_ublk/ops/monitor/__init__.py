"""Metrics of running devices, for Prometheus."""

from btrfs_ublk.ops.monitor.exporter import serve_metrics
from btrfs_ublk.ops.monitor.metrics import metrics_text

__all__ = ["metrics_text", "serve_metrics"]
