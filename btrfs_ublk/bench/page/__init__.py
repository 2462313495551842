"""The page that ``btrfs-ublk bench report`` makes of files of results.

From the bottom up: ``inputs`` reads and checks files, ``labels`` and ``measures`` say
what they are, ``shapes`` is what a page is made of, ``comparisons``, ``matrices`` and
``documents`` make that of results, ``drawing`` and ``svg`` make pictures, ``build``
puts all together, ``render`` writes it down.
"""
