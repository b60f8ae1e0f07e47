"""Upper bounds of the memory that a library allocates to open a file, read from the file's own tables beforehand.

Pure functions, pool. In: encoded bytes whose format `magic` has named. Out: Bounded, which holds the bytes to open,
without unused tags, and an upper bound of the memory that opening them takes; or the MediaError that refuses the file.
FFmpeg and Pillow allocate memory by counts in the file (a sample table, a list of edits, a deflated header), even if
the file does not hold so many entries. Each module walks the boxes, chunks or directories of one family of containers.

    bytes | walk, cut tags | bound <= 48 MiB + 2 x file? | reserve | open (mm/open)
"""
