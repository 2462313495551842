"""One published table per module, in ``PUBLISHED``; see ``bench.figures``."""
