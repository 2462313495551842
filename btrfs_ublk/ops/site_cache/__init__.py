"""A site's cache in front of origins, by nginx (docs/how-to/site-caches.md)."""
