"""Read what is below a prefix of an S3 bucket: a request for each thousand objects."""

from __future__ import annotations

from contextlib import closing

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.s3 import Bucket
from btrfs_ublk.volume.entry import origin_of
from btrfs_ublk.volume.listing import MAX_ENTRIES, Listing, identity


def read_bucket(source: SourceKeys) -> Listing:
    """Read a prefix. A key that ends with "/" is a directory."""
    listing, prefix = Listing(origin_of(source)), source["key"]
    with closing(Bucket(listing.origin, source)) as bucket:
        for number, page in enumerate(bucket.pages(source["bucket"], prefix)):
            if number > MAX_ENTRIES // 100:
                raise BtrfsUblkError(
                    f"{listing.origin} is listed in more than {number} pages",
                    hint="take a part of it",
                )
            for each in page:
                key, size = each.get("Key", ""), each.get("Size")
                if not isinstance(size, int) or size < 0:
                    raise listing.refused(key, "is an object without a size")
                path = key.removeprefix(prefix)
                if key == prefix and not size:
                    continue
                if path.endswith("/") and not size:
                    listing.add_directory(path.removesuffix("/"))
                    continue
                # Some stores leave its quotes out, but only here.
                tag = each.get("ETag", "").strip('"')
                more = identity(tag and f'"{tag}"') | {"key": key, "size": size}
                at = each.get("LastModified")
                listing.add(path, source | more, at.timestamp() if at else None)
    return listing.complete()
