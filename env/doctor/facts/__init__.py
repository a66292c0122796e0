"""What is so on this host, and nothing about what it means: records, and the functions that look.

Each module holds the records of one group and a `look`. A fact that cannot be had is None; no look raises on a host
that lacks the files, serves garbage, or runs commands that never end (`probing` sees to it).
"""
