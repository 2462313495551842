"""Measurements other than reading by fio (``bench.peer.Contest``)."""
