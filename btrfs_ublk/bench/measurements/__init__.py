"""Measurements other than reading by fio (``bench.measurement``)."""
