"""Tools for operators: diagnosis, metrics, manuals."""
