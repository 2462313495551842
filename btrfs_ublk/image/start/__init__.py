"""What an image's start reads, derived from its command before it has ever run."""
