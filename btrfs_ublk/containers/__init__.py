"""What container runtimes ask of us (docs/design/containers.md)."""
