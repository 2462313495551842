"""For other projects' tests: fixtures for pytest, and a web server that answers ranges.

Modules here import what they need when it is first used: the plugin is loaded by every
pytest of an environment, also where no test asks for any of this.
"""
