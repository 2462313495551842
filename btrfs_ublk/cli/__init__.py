"""The command line: one file per noun, each with a click command named ``command``."""
