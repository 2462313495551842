"""The page that ``btrfs-ublk bench report`` makes of files of results.

``inputs`` reads and checks files, and says what kind of machine they are from;
``lead`` picks what the page begins with;
``comparisons`` and ``matrices`` make tables and ``charts`` of the rest;
``build`` assembles the page, and page.html lays it out.
"""
