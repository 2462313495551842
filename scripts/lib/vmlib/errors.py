"""The one exception of scripts/vm."""


class VmError(Exception):
    """Something the user can be told in one message; no traceback is shown."""
