"""Files of sorted numbers: 8 bytes each, little-endian."""
