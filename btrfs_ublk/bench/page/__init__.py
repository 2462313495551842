"""The page that ``btrfs-ublk bench report`` makes of files of results.

``inputs`` reads and checks files, and says what kind of machine they are from;
``comparisons`` and ``matrices`` make tables and ``plots`` of them;
``build`` assembles the page, and page.html lays it out.
"""
