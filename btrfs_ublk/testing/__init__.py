"""For other projects' tests: fixtures for pytest, and a web server for ranges.

Modules here import what they need when it is first used: every pytest of an environment
loads the plugin, even if no test uses it.
"""
