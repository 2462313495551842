"""Write to the map in a file: pin the same unit of all sources in one commit, and the
next one in another, until killed. Sources are the keys that follow the name of the file
and how many pages of its log there are between checkpoints.
"""

import itertools
import sqlite3
import sys
import time

path, pages, *keys = sys.argv[1:]
connection = sqlite3.connect(path)
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("PRAGMA synchronous=OFF")
connection.execute(f"PRAGMA wal_autocheckpoint={pages}")
for source, key in enumerate(keys):
    row = (source, bytes.fromhex(key))
    connection.execute("INSERT INTO sources VALUES (?, ?, NULL)", row)
for unit in itertools.count():
    for source, _ in enumerate(keys):
        row = (source, unit, bytes(32))
        connection.execute("INSERT INTO pins VALUES (?, ?, ?)", row)
    connection.commit()
    if unit == 100:
        print("pinning", flush=True)
    time.sleep(0.0002)
